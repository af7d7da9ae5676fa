"""The rules over a configuration: everything that can be known to be wrong before anything heavy is imported."""

from omegaconf import DictConfig, OmegaConf

from rlpost.config.build import typed
from rlpost.config.nodes import plugin_nodes
from rlpost.config.schema import Config
from rlpost.config.validation import algorithm, cluster, evaluation, plugins, rewards, rollout, settings
from rlpost.errors import UserError

RULES = (cluster.check, algorithm.check, rollout.check, evaluation.check, rewards.check, rollout.check_context)


def validate(cfg: DictConfig) -> Config:
    """Check a configuration, and complete its plug-in nodes with their targets' defaults.

    Returns: its settings.

    Raises: UserError, one line that names the key.
    """
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise UserError(f"{missing[0]} is missing; set {missing[0]}=...")
    settings.check_known_keys(cfg, Config, "")
    nodes = plugin_nodes(cfg)
    for node in nodes:
        plugins.check(node, cfg.plugins.allow)
        plugins.complete(node)
    plugins.check_metrics(cfg)
    made = typed(cfg)
    settings.check_ranges(made, "")
    for rule in RULES:
        rule(made)
    plugins.check_further(nodes, cluster.num_ranks(made))
    return made
