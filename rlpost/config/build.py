"""From a configuration to objects: the plug-in nodes it holds, and the only caller of Hydra's instantiate.

Imports no torch.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from rlpost.config.targets import check_packages
from rlpost.errors import UserError, require

# Parameters of a target that the program fills in; a config cannot set them.
ENGINE_PARAMETERS = frozenset({"directory", "end_token_ids", "max_model_len", "trust_remote_code"})


@dataclass(frozen=True)
class RewardNode:
    """A reward function's node, and what stands in it beside the function's own settings."""

    target: dict[str, Any]
    weight: float = 1.0
    tasks: list[str] | None = None  # those of a mixture it applies to; None: all
    runs_in: str = "processes"  # or "trainer": in the worker itself, once sampling is over


def conf_dir() -> Path:
    """The shipped configuration: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parents[1]
    beside = package.parent / "conf"
    return beside if (beside / "train.yaml").is_file() else package / "_conf"


def build(node: DictConfig | Mapping[str, Any], **injected: Any) -> Any:
    """Make the object a `_target_` node describes, from plain arguments.

    Raises: UserError when the target refuses its settings, with the target's own words, or lacks a package.
    """
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(node)
    try:
        return instantiate(plain, **injected, _convert_="all")
    except UserError:
        raise
    except Exception as error:  # Hydra hides the reason in the cause
        for _, inner in nested_nodes(plain, ""):
            if "_target_" in inner:
                check_packages(inner["_target_"], inner["_target_"])
        cause = error.__cause__ or error
        if isinstance(cause, ValueError | TypeError):
            raise UserError(f"{plain.get('_target_')}: {cause}") from cause
        raise


def reward_nodes(cfg: DictConfig) -> dict[str, RewardNode]:
    """The reward group by name. A group that is one target itself gets a name."""
    plain = OmegaConf.to_container(cfg.reward, resolve=True)
    if "_target_" in plain:
        plain = {str(plain["_target_"]).rsplit(".", 1)[-1].lower(): plain}
    own = {f.name for f in fields(RewardNode)} - {"target"}

    def split(node: dict[str, Any]) -> RewardNode:
        target = {key: value for key, value in node.items() if key not in own}
        return RewardNode(target, **{key: value for key, value in node.items() if key in own})

    return {name: split(node) for name, node in plain.items()}


def correct_function(cfg: DictConfig) -> str:
    """The reward function that decides whether a completion is correct."""
    return cfg.evaluation.correct_function or next(iter(reward_nodes(cfg)))


def correct_function_by_task(cfg: DictConfig) -> dict[str, str]:
    """For tasks of a mixture that `correct_function` does not apply to, the first function that does."""
    nodes, default = reward_nodes(cfg), correct_function(cfg)
    found = {}
    for task in OmegaConf.select(cfg, "task.tasks") or ():
        applying = [name for name, node in nodes.items() if node.tasks is None or task in node.tasks]
        if applying and default not in applying:
            found[task] = applying[0]
    return found


def target_nodes(cfg: DictConfig) -> Iterator[tuple[str, dict[str, Any], frozenset[str]]]:
    """Every plug-in point: its key, its node, and the parameters the program fills in."""
    keys = ["algorithm.advantage", "algorithm.loss", "reducer", "model", "task", "cluster"]
    for key in keys:
        yield key, _plain_node(cfg, key), frozenset()
    if cfg.algorithm.filter is not None:
        yield "algorithm.filter", _plain_node(cfg, "algorithm.filter"), frozenset()
    if cfg.environment is not None:
        yield "environment", _plain_node(cfg, "environment"), frozenset()
    for group in ("algorithm.corrections", "algorithm.reward_processing"):
        for name in OmegaConf.select(cfg, group):
            yield f"{group}.{name}", _plain_node(cfg, f"{group}.{name}"), frozenset()
    yield "rollout.engine", _plain_node(cfg, "rollout.engine"), ENGINE_PARAMETERS
    for name, node in reward_nodes(cfg).items():
        yield f"reward.{name}" if "_target_" not in cfg.reward else "reward", node.target, frozenset()


def nested_nodes(node: Mapping[str, Any], key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A node and every `_target_` node inside it, each with its key."""
    yield key, node

    def inside(value: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if isinstance(value, Mapping):
            if "_target_" in value:
                yield from nested_nodes(value, place)
            else:
                for name, inner in value.items():
                    yield from inside(inner, f"{place}.{name}")
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                yield from inside(inner, f"{place}.{index}")

    for name, value in node.items():
        yield from inside(value, f"{key}.{name}")


def task_names(cfg: DictConfig) -> list[str]:
    """The task's name, or those of a mixture's tasks."""
    tasks = cfg.task.get("tasks")
    return list(tasks) if tasks else [build(cfg.task).name]


def _plain_node(cfg: DictConfig, key: str) -> dict[str, Any]:
    node = OmegaConf.select(cfg, key)
    if not isinstance(node, DictConfig):
        raise UserError(f"{key}={node}: expected a group option or a mapping with _target_")
    return OmegaConf.to_container(node, resolve=True)


def check_task(cfg: DictConfig) -> None:
    """Load the task, so that a wrong file, field or split is answered before anything heavy starts."""
    data = build(cfg.task).load()
    if cfg.stream.curriculum is not None:
        from rlpost.data.stream import rising

        rising(data.train, cfg.stream.curriculum)
    e = cfg.evaluation
    asked = [key for key, is_set in (("every", e.every), ("at_start", e.at_start), ("at_end", e.at_end)) if is_set]
    if asked and not data.held_out:
        raise UserError(
            f"evaluation.{asked[0]}={e[asked[0]]}: the task holds out no prompts to evaluate; hold some out, or set "
            + ", ".join(f"evaluation.{key}={0 if key == 'every' else 'false'}" for key in asked)
        )
    if not data.train:
        raise UserError("task: no prompt is left to train on; hold out fewer, or give held-out rows that differ")


def prepare(cfg: DictConfig) -> None:
    """Let the cluster's processes, where they can be prepared, import what this configuration needs.

    Raises: UserError if that is not installed.
    """
    for key, node, _ in target_nodes(cfg):
        for place, inner in nested_nodes(node, key):
            check_packages(inner["_target_"], f"{place}._target_={inner['_target_']}")
    if cfg.trainer.lora.rank:
        require({"peft": "lora"}, f"trainer.lora.rank={cfg.trainer.lora.rank}")
    cluster = build(cfg.cluster)
    if hasattr(cluster, "prepare"):
        cluster.prepare(OmegaConf.to_container(cfg, resolve=True))


def resolve_paths(cfg: DictConfig) -> None:
    """Make paths absolute, so that workers and a later resume from elsewhere mean the same files."""
    cfg.run_dir = os.path.abspath(cfg.run_dir)
    scheme = "sqlite:///"
    uri = cfg.tracking.uri
    if uri and uri.startswith(scheme):
        cfg.tracking.uri = scheme + os.path.abspath(uri.removeprefix(scheme))
    if cfg.tracking.artifacts and "://" not in cfg.tracking.artifacts:
        cfg.tracking.artifacts = os.path.abspath(cfg.tracking.artifacts)


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
