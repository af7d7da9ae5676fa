"""The plug-in nodes of a configuration: mappings with a `_target_`, and where they stand."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from rlpost.config.schema import RewardConfig
from rlpost.errors import UserError

# Places of one node, and places of several by name.
SINGLE = (
    *("algorithm.advantage", "algorithm.loss", "algorithm.filter", "reducer", "model", "task", "environment"),
    *("rollout.engine", "optimizer", "cluster"),
)
NAMED = ("algorithm.corrections", "algorithm.reward_processing", "metrics")
OPTIONAL = ("algorithm.filter", "environment")
# Parameters of a target that the program fills in; a configuration cannot set them.
INJECTED = {"rollout.engine": frozenset({"directory", "end_token_ids", "max_model_len", "trust_remote_code"})}
BESIDE_A_REWARD = frozenset(f.name for f in fields(RewardConfig)) - {"target"}


@dataclass(frozen=True)
class PluginNode:
    """A `_target_` node.

    Attributes:
        key: where it stands, as in `algorithm.loss`.
        config: the node in the configuration, which gets the defaults of what it leaves out.
        injected: parameters of its target that the program fills in.
        beside: keys that are not the target's own.
    """

    key: str
    config: DictConfig
    injected: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()

    @property
    def target(self) -> str:
        return str(self.config["_target_"])

    @property
    def settings(self) -> Mapping[str, Any]:
        """The target's own settings and its `_target_`, as plain values."""
        return {name: value for name, value in as_dict(self.config).items() if name not in self.beside}


def as_dict(node: Any, resolve: bool = True) -> dict[str, Any]:
    """A mapping of OmegaConf as plain values, interpolations resolved or as they stand."""
    plain = OmegaConf.to_container(node, resolve=resolve)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in cast(dict[Any, Any], plain).items()}


def plugin_nodes(cfg: DictConfig) -> list[PluginNode]:
    """Every plug-in node, and those inside of each after it.

    Raises: UserError for what is no such node.
    """
    return [node for outer in _outer_nodes(cfg) for node in (outer, *_inside(outer.config, outer.key))]


def _outer_nodes(cfg: DictConfig) -> Iterator[PluginNode]:
    for key in SINGLE:
        if key in OPTIONAL and not OmegaConf.select(cfg, key):
            continue
        yield PluginNode(key, _node(cfg, key), INJECTED.get(key, frozenset()))
    for group in NAMED:
        for name, value in OmegaConf.select(cfg, group).items():
            if not (group == "metrics" and isinstance(value, str)):
                yield PluginNode(f"{group}.{name}", _node(cfg, f"{group}.{name}"))
    for key in ["reward"] if "_target_" in cfg.reward else [f"reward.{name}" for name in cfg.reward]:
        yield PluginNode(key, _node(cfg, key), beside=BESIDE_A_REWARD)


def _node(cfg: DictConfig, key: str) -> DictConfig:
    node = OmegaConf.select(cfg, key)
    if not isinstance(node, DictConfig) or not node:
        raise UserError(f"{key}={node}: expected a group option or a mapping with _target_")
    if not isinstance(node.get("_target_"), str):
        raise UserError(f"{key}: expected a mapping with _target_ (the class or function to use)")
    return node


def _inside(node: DictConfig | ListConfig, key: str) -> Iterator[PluginNode]:
    names = list(node) if isinstance(node, DictConfig) else range(len(node))
    for name in names:
        inner = node[name]
        if isinstance(inner, DictConfig) and "_target_" in inner:
            yield PluginNode(f"{key}.{name}", inner)
        if isinstance(inner, DictConfig | ListConfig):
            yield from _inside(inner, f"{key}.{name}")
