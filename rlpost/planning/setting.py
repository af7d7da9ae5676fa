"""The plain numbers that an estimate takes, from a configuration."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpost.config.build import build, conf_dir
from rlpost.config.explain import explain
from rlpost.config.schema import Config
from rlpost.config.targets import constant_of
from rlpost.config.validation import validate
from rlpost.config.validation.cluster import ranks_per_engine
from rlpost.errors import UserError, nearest
from rlpost.planning.costs import MODELS, Batch, Shape
from rlpost.planning.estimate import Setting

WIDTHS = {"float32": 4, "bfloat16": 2}


def composed(overrides: Sequence[str], gpus: int, model: str | None) -> Config:
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
        cfg.model = OmegaConf.create({"_target_": "rlpost.models.sources.PathOrHub", "path": model})
    return validate(cfg)


def shape_of(settings: Config, model: str | None) -> Shape:
    """The shape of a name of MODELS, of a config.json, or of the configuration's own model."""
    if model in MODELS:
        return Shape.from_config(MODELS[model], model)
    if model is None:
        file = _directory(build(settings.model)) / "config.json"
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


def setting_of(settings: Config, shape: Shape, arguments: argparse.Namespace) -> Setting:
    """Raises: UserError for numbers that do not go together, and for what the model of costs leaves out."""
    _check_known(settings, shape, arguments)
    gpus, a, engine = arguments.gpus, settings.algorithm, settings.rollout.engine
    kl_in_reward = a.kl.reward_coef > 0  # its own two passes
    optimizer_steps = a.num_mini_batches * a.num_epochs
    _, sharing = ranks_per_engine(settings)
    return Setting(
        shape=shape,
        gpus=gpus,
        batch=_batch(settings, arguments),
        optimizer_steps=optimizer_steps,
        epochs=a.num_epochs,
        longest=settings.prompt.max_tokens + settings.rollout.max_tokens,
        width=WIDTHS[settings.trainer.precision],
        checkpointing=settings.trainer.activation_checkpointing,
        scorings=(optimizer_steps > 1 or a.top_entropy_share is not None) + kl_in_reward,
        reference_scorings=a.kl.needs_reference + kl_in_reward,
        idle_share=arguments.idle_groups,
        engine_width=WIDTHS[engine_dtype(settings)],
        max_num_seqs=engine.get("max_num_seqs", engine.get("batch_size", 64)),
        block_size=engine.get("block_size", engine.get("page_size")),
        memory_share=None if arguments.gpu == "cpu" else engine.get("gpu_memory_utilization"),
        cache=engine.get("kv_cache_bytes"),
        replicas=settings.trainer.replicas,
        context_parallel=settings.trainer.context_parallel,
        tensor_parallel=sharing,
    )


def _check_known(settings: Config, shape: Shape, arguments: argparse.Namespace) -> None:
    """Raises: UserError for numbers that do not go together, and for what the model of costs leaves out."""
    left_out = {
        "trainer.lora.rank": settings.trainer.lora.rank > 0,
        "trainer.cpu_offload": settings.trainer.cpu_offload,
        "rollout.engine": constant_of(str(settings.rollout.engine["_target_"]), "samples_beside_training", False),
    }
    for key, is_set in left_out.items():
        if is_set:
            raise UserError(f"{key}: rlpost-plan knows whole models on GPUs that also sample, not this; leave it out")
    longest = settings.prompt.max_tokens + settings.rollout.max_tokens
    if shape.context is not None and longest > shape.context:
        raise UserError(
            f"prompt.max_tokens + rollout.max_tokens = {longest} is over the model's context of {shape.context}"
        )
    sharing_key, sharing = ranks_per_engine(settings)
    for name, parts in (
        ("trainer.context_parallel", settings.trainer.context_parallel),
        ("trainer.replicas", settings.trainer.replicas),
        (sharing_key, sharing),
    ):
        if arguments.gpus % parts:
            raise UserError(f"{name}={parts} does not divide --gpus {arguments.gpus}")
    if shape.heads % sharing:
        raise UserError(f"{sharing_key}={sharing} does not divide the model's {shape.heads} heads")
    if arguments.idle_groups and (settings.algorithm.kl.loss_coef or settings.algorithm.entropy_coef):
        raise UserError("--idle-groups: with a KL or an entropy term in the loss every group has a backward pass")
    if not 0 <= arguments.idle_groups <= 1:
        raise UserError(f"--idle-groups {arguments.idle_groups}: expected a share in 0..1")


def _batch(settings: Config, arguments: argparse.Namespace) -> Batch:
    """A rank's part of an optimizer step, of the lengths that are asked for."""
    lengths = {}
    for name, given, most in (
        ("prompt", arguments.prompt_tokens, settings.prompt.max_tokens),
        ("completion", arguments.completion_tokens, settings.rollout.max_tokens),
    ):
        lengths[name] = most if given is None else given
        if not 1 <= lengths[name] <= most:
            raise UserError(f"--{name}-tokens {given}: expected 1..{most}, the configuration's limit")
    data_ranks = arguments.gpus // settings.trainer.context_parallel
    return Batch(
        groups=settings.prompts_per_step // (data_ranks * settings.algorithm.num_mini_batches),
        samples=settings.samples_per_prompt,
        budget=settings.trainer.micro_batch_tokens,
        apart=settings.trainer.layout == "padded",
        **lengths,
    )


def engine_dtype(settings: Config) -> str:
    dtype = settings.rollout.engine.get("dtype", "float32")
    if dtype not in WIDTHS:
        raise UserError(f"rollout.engine.dtype={dtype}: {nearest(dtype, WIDTHS).removeprefix('; ')}")
    return dtype
