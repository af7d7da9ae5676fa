"""rlpost-plan: what a configuration takes of so many GPUs, before any is taken: memory, traffic, FLOPs and seconds.

    rlpost-plan --gpus 8 --gpu h100-80gb --model qwen2.5-7b trainer.precision=bfloat16 prompts_per_step=64 ...

It takes the overrides that rlpost takes and checks them alike. docs/scaling.md has the formulas and what was measured.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpost.config import build, conf_dir
from rlpost.costs import MODELS, Batch, Shape
from rlpost.errors import UserError, run_command
from rlpost.estimate import (
    Item,
    Phase,
    Setting,
    concurrent,
    engine_memory,
    loading,
    phases,
    rollouts_bytes,
    trainer_memory,
    trainer_peak,
    why_not,
)
from rlpost.explain import explain
from rlpost.hardware import GPUS, OPTIONS, Machine, figured
from rlpost.suggest import nearest
from rlpost.validation import validate

WIDTHS = {"float32": 4, "bfloat16": 2}


def composed(overrides: Sequence[str], gpus: int, model: str | None) -> DictConfig:
    """The configuration that rlpost would run on so many ranks, valid.

    Args: model: stands for a model that is not at hand, of which nothing but its shape is asked; None: the overrides'.

    Raises: UserError as rlpost would.
    """
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            cfg = compose("train", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, overrides, conf_dir())) from error
    cfg.name = cfg.run_dir = "plan"
    cfg.cluster = OmegaConf.create({"_target_": "rlpost.cluster.local.Local", "num_processes": gpus})
    if model is not None:
        cfg.model = OmegaConf.create({"_target_": "rlpost.models.PathOrHub", "path": model})
    validate(cfg)
    return cfg


def shape_of(cfg: DictConfig, model: str | None) -> Shape:
    """Of a name of MODELS, a config.json, or the configuration's own model."""
    if model in MODELS:
        return Shape.from_config(MODELS[model], model)
    if model is None:
        file = _directory(build(cfg.model)) / "config.json"
    else:
        file = Path(model)
        if not file.is_file():
            raise UserError(f"--model {model}: neither a config.json nor a known shape{nearest(model, MODELS)}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from error
    return Shape.from_config(config, str(file))


def _directory(source: Any) -> Path:
    """The model's directory, without downloading its weights for a plan."""
    path = getattr(source, "path", None)
    if path is None or Path(path).expanduser().is_dir():
        return source.directory()
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json", revision=source.revision)
    if not isinstance(cached, str):
        raise UserError(f"model.path={path} is not on this machine; give its config.json as --model, or a known shape")
    return Path(cached).parent


def setting_of(cfg: DictConfig, shape: Shape, arguments: argparse.Namespace) -> Setting:
    """Raises: UserError for numbers that do not go together, and for what the model of costs leaves out."""
    left_out = {
        "trainer.lora.rank": cfg.trainer.lora.rank > 0,
        "trainer.cpu_offload": cfg.trainer.cpu_offload,
        "rollout.engine": str(cfg.rollout.engine._target_).endswith(".VLLMServers"),
    }
    for key, is_set in left_out.items():
        if is_set:
            raise UserError(f"{key}: rlpost-plan knows whole models on GPUs that also sample, not this; leave it out")
    gpus, a, engine = arguments.gpus, cfg.algorithm, cfg.rollout.engine
    context, replicas = cfg.trainer.context_parallel, cfg.trainer.replicas
    longest = cfg.prompt.max_tokens + cfg.rollout.max_tokens
    if shape.context is not None and longest > shape.context:
        raise UserError(
            f"prompt.max_tokens + rollout.max_tokens = {longest} is over the model's context of {shape.context}"
        )
    sharing = engine.get("tensor_parallel", 1)
    for name, parts in (
        ("trainer.context_parallel", context),
        ("trainer.replicas", replicas),
        ("rollout.engine.tensor_parallel", sharing),
    ):
        if gpus % parts:
            raise UserError(f"{name}={parts} does not divide --gpus {gpus}")
    if shape.heads % sharing:
        raise UserError(f"rollout.engine.tensor_parallel={sharing} does not divide the model's {shape.heads} heads")
    lengths = {}
    for name, given, most in (
        ("prompt", arguments.prompt_tokens, cfg.prompt.max_tokens),
        ("completion", arguments.completion_tokens, cfg.rollout.max_tokens),
    ):
        lengths[name] = most if given is None else given
        if not 1 <= lengths[name] <= most:
            raise UserError(f"--{name}-tokens {given}: expected 1..{most}, the configuration's limit")
    reference = a.kl.coef > 0 or a.kl.measure
    kl_in_reward = a.kl.coef > 0 and a.kl.place == "reward"  # its own two passes
    if arguments.idle_groups and ((a.kl.coef and a.kl.place == "loss") or a.entropy_coef):
        raise UserError("--idle-groups: with a KL or an entropy term in the loss every group has a backward pass")
    if not 0 <= arguments.idle_groups <= 1:
        raise UserError(f"--idle-groups {arguments.idle_groups}: expected a share in 0..1")
    data_ranks = gpus // context
    batch = Batch(
        groups=cfg.prompts_per_step // (data_ranks * a.num_mini_batches),
        samples=cfg.samples_per_prompt,
        budget=cfg.trainer.micro_batch_tokens,
        apart=cfg.trainer.layout == "padded",
        **lengths,
    )
    optimizer_steps = a.num_mini_batches * a.num_epochs
    return Setting(
        shape=shape,
        gpus=gpus,
        batch=batch,
        optimizer_steps=optimizer_steps,
        epochs=a.num_epochs,
        longest=longest,
        width=WIDTHS[cfg.trainer.precision],
        checkpointing=cfg.trainer.activation_checkpointing,
        scorings=(optimizer_steps > 1 or a.top_entropy_share is not None) + kl_in_reward,
        reference_scorings=reference + kl_in_reward,
        idle_share=arguments.idle_groups,
        engine_width=WIDTHS[_engine_dtype(cfg)],
        max_num_seqs=engine.get("max_num_seqs", engine.get("batch_size", 64)),
        block_size=engine.get("block_size", engine.get("page_size")),
        memory_share=None if arguments.gpu == "cpu" else engine.get("gpu_memory_utilization"),
        cache=engine.get("kv_cache_bytes"),
        replicas=replicas,
        context_parallel=context,
        tensor_parallel=sharing,
    )


def _engine_dtype(cfg: DictConfig) -> str:
    dtype = cfg.rollout.engine.get("dtype", "float32")
    if dtype not in WIDTHS:
        raise UserError(f"rollout.engine.dtype={dtype}: {nearest(dtype, WIDTHS).removeprefix('; ')}")
    return dtype


def report(s: Setting, machine: Machine) -> dict[str, Any]:
    """Everything, as JSON would have it."""
    found = phases(s, machine)
    seconds = sum(phase.seconds for phase in found)
    tokens = s.groups * s.batch.samples * s.batch.completion
    return {
        "parameters": s.shape.parameters,
        "shards": s.shards,
        "positions_per_update": s.batch.positions,
        "micro_batches_per_update": s.batch.micro_batches,
        "trainer_memory": [asdict(item) for item in trainer_memory(s)],
        "engine_memory": [asdict(item) for item in engine_memory(s, machine)],
        "completions_together": concurrent(s, machine),
        "phases": [asdict(phase) for phase in found],
        "seconds": seconds,
        "completion_tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "flops_share": sum(phase.flops for phase in found) / machine.flops / seconds,
        "rollouts_bytes": rollouts_bytes(s),
        "checkpoint_bytes": s.shape.checkpoint_bytes,
        "loading_bytes": loading(s, machine),
        "fits": not why_not(s, machine),
        "why_not": why_not(s, machine),
    }


def text(title: str, s: Setting, machine: Machine) -> str:
    """Tables for a terminal."""
    r = report(s, machine)
    b = s.batch
    split = f"{s.shards} shards" + f" x {s.replicas} replicas" * (s.replicas > 1)
    split += f", context parallel {s.context_parallel}" * (s.context_parallel > 1)
    lines = [
        f"{title}: {s.shape.parameters / 1e9:.3g}e9 parameters, {split}, tensor parallel {s.tensor_parallel} in the engine",
        f"a step: {s.groups} prompts of {b.prompt} tokens x {b.samples} completions of {b.completion}; of a data rank and "
        f"optimizer step {b.positions} packed positions in {b.micro_batches} micro-batches",
        "",
        f"{'memory of a GPU':<52}{'GB':>9}",
        *(_item(Item(**item)) for item in r["trainer_memory"]),
        _item(Item("trainer, at its most", trainer_peak(s), "estimate")),
        *(_item(Item(**item)) for item in r["engine_memory"]),
        f"  {'completions decoded together':<50}{r['completions_together']:>9}",
        "",
        f"{'a step of a GPU':<36}{'TFLOP':>10}{'mem GB':>10}{'link GB':>10}"
        f"{'products s':>12}{'memory s':>10}{'links s':>10}{'s':>10}",
        *(_row(Phase(**phase)) for phase in r["phases"]),
        f"  {'together':<34}{_number(r['seconds']):>72}",
        "",
        f"{_number(r['tokens_per_s'])} completion tokens/s, {_number(r['tokens_per_s'] / s.gpus)} of each GPU; "
        f"{r['flops_share']:.1%} of the products' peak",
        f"every rank receives {r['rollouts_bytes'] / 1e6:.3g} MB of completions a step; a checkpoint has "
        f"{r['checkpoint_bytes'] / 1e9:.4g} GB; starting takes {r['loading_bytes'] / 1e9:.4g} GB of a node's own memory",
        "it fits" if r["fits"] else "it does not fit (seconds are as if it did):",
        *(f"  {reason}" for reason in r["why_not"]),
    ]
    return "\n".join(lines)


def _item(item: Item) -> str:
    return f"  {item.name:<50}{item.size / 1e9:>9.3f}  {item.kind}"


def _row(p: Phase) -> str:
    counts = (p.flops / 1e12, p.memory_bytes / 1e9, p.link_bytes / 1e9)
    seconds = (p.products_s, p.memory_s, p.link_s, p.seconds)
    shown = [*(f"{_number(count):>10}" for count in counts), "  ", *(f"{_number(value):>10}" for value in seconds)]
    return f"  {p.name:<34}{''.join(shown)}"


def _number(value: float) -> str:
    """Three digits, or the whole number where it has more; nothing for 0."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1e-4 else "" if value == 0 else f"{value:.0e}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="rlpost-plan", description=__doc__.splitlines()[0])
    made.add_argument("overrides", nargs="*", help="of the configuration, as rlpost takes them")
    made.add_argument("--gpus", type=int, required=True)
    made.add_argument("--gpu", choices=list(GPUS), required=True)
    made.add_argument("--per-node", type=int, default=8, help="GPUs of a node")
    made.add_argument(
        "--model", help=f"a config.json, or one of {', '.join(MODELS)}; default: the configuration's model"
    )
    made.add_argument("--prompt-tokens", type=int, help="mean length; default: the longest allowed")
    made.add_argument("--completion-tokens", type=int, help="mean length; default: the longest allowed")
    made.add_argument("--idle-groups", type=float, default=0.0, help="share of groups without an advantage")
    made.add_argument("--json", action="store_true")
    for name, (_, words) in OPTIONS.items():
        made.add_argument(f"--{name}", type=float, help=words)
    return made


def planned(command: Sequence[str] | None = None) -> tuple[argparse.Namespace, Setting, Machine]:
    """Of a command line.

    Raises: UserError.
    """
    arguments = parser().parse_intermixed_args(command)
    for name in ("gpus", "per_node"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: expected at least 1")
    cfg = composed(arguments.overrides, arguments.gpus, arguments.model)
    setting = setting_of(cfg, shape_of(cfg, arguments.model), arguments)
    given = {name: getattr(arguments, name.replace("-", "_")) for name in OPTIONS}
    dtypes = (cfg.trainer.precision, _engine_dtype(cfg))
    return arguments, setting, figured(arguments.gpu, given, *dtypes, arguments.gpus, arguments.per_node)


def _main() -> int:
    arguments, setting, machine = planned()
    if arguments.json:
        print(json.dumps(report(setting, machine), indent=2))
    else:
        print(text(f"{arguments.model or 'the model'} on {arguments.gpus} {arguments.gpu}", setting, machine))
    return 0


def main() -> None:
    run_command("rlpost-plan", _main)


if __name__ == "__main__":
    main()
