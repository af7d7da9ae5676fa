"""Rules over plug-in nodes: what may be imported, and what a target says of its own settings."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from rlpost.config.nodes import BESIDE_A_REWARD, PluginNode
from rlpost.config.plugins import split_path
from rlpost.config.schema import RewardConfig
from rlpost.config.source import Definition, find
from rlpost.config.targets import check_target, constant_of, defaults_of
from rlpost.errors import UserError

METRIC_ARGUMENTS = ("rollouts",)


def check(node: PluginNode, allowed: Sequence[str]) -> None:
    """Check that a node's target may be imported, and that it has the node's settings."""
    package = node.target.split(".", 1)[0]
    if package != "rlpost" and package not in allowed:
        raise UserError(
            f"{node.key}._target_={node.target}: {package} is not rlpost's own code; add it to plugins.allow to let this "
            f"configuration import it: plugins.allow=[{package}]"
        )
    check_target(node.settings, node.key, node.injected)
    functions = constant_of(node.target, "function_settings", {})
    for name, arguments in functions.items():
        if isinstance(path := node.settings.get(name), str):
            _check_function(path, f"{node.key}.{name}", arguments, allowed)


def complete(node: PluginNode) -> None:
    """Write the defaults of what the node leaves out into the configuration: a run's own says all that it ran with."""
    missing = defaults_of(node.settings, node.key, node.injected)
    if node.beside:
        beside = OmegaConf.structured(RewardConfig(target={}))
        missing |= {name: beside[name] for name in BESIDE_A_REWARD if name not in node.config}
    with open_dict(node.config):
        for name in sorted(missing):
            node.config[name] = missing[name]


def check_metrics(cfg: DictConfig) -> None:
    """Check that the functions behind `metrics` may be imported, and exist."""
    for name, path in cfg.metrics.items():
        if isinstance(path, str):
            _check_function(path, f"metrics.{name}", METRIC_ARGUMENTS, cfg.plugins.allow)


def check_further(nodes: Sequence[PluginNode], num_ranks: int) -> None:
    """A target's own rules: `checked_by` names a function of (key, node, num_ranks), in a module that imports no torch."""
    for node in nodes:
        if path := constant_of(node.target, "checked_by", None):
            module_name, name = split_path(path, f"{node.key}._target_")
            getattr(importlib.import_module(module_name), name)(node.key, node.settings, num_ranks)


def _check_function(path: str, key: str, arguments: Sequence[str], allowed: Sequence[str]) -> None:
    """Check that the function at an import path exists, may be imported, and takes these arguments first."""
    module_name, name = split_path(path, key)
    package = Path(module_name).stem if module_name.endswith(".py") else module_name.split(".", 1)[0]
    if package not in allowed:
        raise UserError(f"{key}={path}: add {package} to plugins.allow to import it: plugins.allow=[{package}]")
    definition: Definition | None = find(module_name, name, key)
    signature = definition and definition.signature()
    if signature is not None and list(signature.parameters)[: len(arguments)] != list(arguments):
        raise UserError(f"{key}={path}: takes ({', '.join(signature.parameters)}); expected ({', '.join(arguments)})")
