"""Typed settings and objects from a configuration. This is the only caller of Hydra's instantiate.

Imports no torch.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from rlpost.config.plugins import load_function
from rlpost.config.schema import Config, RewardConfig
from rlpost.config.targets import check_packages
from rlpost.errors import UserError, require


def schema() -> DictConfig:
    """The schema as OmegaConf has it. Overrides may set any key of a plug-in point: its target says which there are."""
    made = OmegaConf.structured(Config)

    def open_nodes(section: DictConfig, kind: type) -> None:
        hints = get_type_hints(kind)
        for field in fields(kind):
            if is_dataclass(hints[field.name]):
                open_nodes(section[field.name], hints[field.name])
            elif isinstance(value := section.get(field.name), DictConfig):
                OmegaConf.set_struct(value, False)

    open_nodes(made, Config)
    return made


ConfigStore.instance().store(name="schema", node=schema())


def typed(cfg: DictConfig) -> Config:
    """The configuration as the schema's dataclasses, interpolations resolved and plug-in nodes as plain mappings."""
    settings = OmegaConf.to_object(OmegaConf.merge(schema(), cfg))
    assert isinstance(settings, Config)
    return settings


def conf_dir() -> Path:
    """The shipped configuration: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parents[1]
    beside = package.parent / "conf"
    return beside if (beside / "train.yaml").is_file() else package / "_conf"


def build(node: Mapping[str, Any], **injected: Any) -> Any:
    """Make the object a `_target_` node describes, from plain arguments.

    Raises: UserError when the target refuses its settings, with the target's own words, or lacks a package.
    """
    try:
        return instantiate(dict(node), **injected, _convert_="all")
    except UserError:
        raise
    except Exception as error:  # Hydra hides the reason in the cause
        for _, target in _targets(node, ""):
            check_packages(target, target)
        cause = error.__cause__ or error
        if isinstance(cause, ValueError | TypeError):
            raise UserError(f"{node.get('_target_')}: {cause}") from cause
        raise


def _targets(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """The targets of a node and of all nodes inside it, each with the key of its `_target_`."""
    if isinstance(node, Mapping):
        inner = cast(Mapping[str, Any], node).items()
    else:
        inner = enumerate(cast(list[Any], node)) if isinstance(node, list) else ()
    for name, value in inner:
        place = f"{key}.{name}".removeprefix(".")
        if name == "_target_":
            yield place, str(value)
        else:
            yield from _targets(value, place)


def build_metric(name: str, given: Any) -> Any:
    """A metric's function, from its import path or its node."""
    return load_function(given, f"metrics.{name}") if isinstance(given, str) else build(given)


def reward_nodes(settings: Config) -> dict[str, RewardConfig]:
    """The reward group by name. A group that is one target itself gets a name."""
    group = settings.reward
    if "_target_" in group:
        group = {str(group["_target_"]).rsplit(".", 1)[-1].lower(): group}
    own = {f.name for f in fields(RewardConfig)} - {"target"}

    def split(node: Mapping[str, Any]) -> RewardConfig:
        target = {key: value for key, value in node.items() if key not in own}
        return RewardConfig(target, **{key: value for key, value in node.items() if key in own})

    return {name: split(node) for name, node in group.items()}


def correct_function(settings: Config) -> str:
    """The reward function that decides whether a completion is correct."""
    return settings.evaluation.correct_function or next(iter(reward_nodes(settings)))


def correct_function_by_task(settings: Config) -> dict[str, str]:
    """The first function that applies, for each task of a mixture that `correct_function` does not apply to."""
    nodes, default = reward_nodes(settings), correct_function(settings)
    found: dict[str, str] = {}
    for task in settings.task.get("tasks") or ():
        applying = [name for name, node in nodes.items() if node.tasks is None or task in node.tasks]
        if applying and default not in applying:
            found[task] = applying[0]
    return found


def task_names(settings: Config) -> list[str]:
    """The task's name, or those of a mixture's tasks."""
    return list(settings.task.get("tasks") or [build(settings.task).name])


def prepare(settings: Config) -> None:
    """Let the cluster's processes, where they can be prepared, import what this configuration needs.

    Raises: UserError if that is not installed.
    """
    for key, target in _targets(asdict(settings), ""):
        check_packages(target, f"{key}={target}")
    if settings.trainer.lora.rank:
        require({"peft": "lora"}, f"trainer.lora.rank={settings.trainer.lora.rank}")
    cluster = build(settings.cluster)
    if hasattr(cluster, "prepare"):
        cluster.prepare(asdict(settings))


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
            found |= flat(cast(dict[str, Any], value), f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
