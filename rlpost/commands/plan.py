"""rlpost-plan: what a configuration takes of so many GPUs, before any is taken: memory, traffic, FLOPs and seconds.

    rlpost-plan --gpus 8 --gpu h100-80gb --model qwen2.5-7b trainer.precision=bfloat16 prompts_per_step=64 ...

It takes the overrides that rlpost takes and checks them alike. docs/scaling.md has the formulas and what was measured.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlpost.errors import UserError, run_command
from rlpost.planning.costs import MODELS
from rlpost.planning.estimate import (
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
from rlpost.planning.hardware import GPUS, OPTIONS, Machine, machine_of
from rlpost.planning.setting import composed, engine_dtype, setting_of, shape_of


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
    made = argparse.ArgumentParser(prog="rlpost-plan", description=(__doc__ or "").splitlines()[0])
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
    """The setting and the machine that a command line describes.

    Raises: UserError.
    """
    arguments = parser().parse_intermixed_args(command)
    for name in ("gpus", "per_node"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: expected at least 1")
    settings = composed(arguments.overrides, arguments.gpus, arguments.model)
    setting = setting_of(settings, shape_of(settings, arguments.model), arguments)
    given = {name: getattr(arguments, name.replace("-", "_")) for name in OPTIONS}
    dtypes = (settings.trainer.precision, engine_dtype(settings))
    return arguments, setting, machine_of(arguments.gpu, given, *dtypes, arguments.gpus, arguments.per_node)


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
