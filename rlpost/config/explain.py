"""Hydra's and OmegaConf's errors, said in one line that names the key and the nearest valid one."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    UnsupportedValueType,
    ValidationError,
)

from rlpost.errors import UserError, nearest, require

EXPECTED = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "a text"}
# Choices that plug-ins of Hydra bring, with what `rlpost.errors.require` takes.
PLUGINS = {
    "hydra/launcher=joblib": {"hydra_plugins.hydra_joblib_launcher": "joblib"},
    "hydra/launcher=ray": {"hydra_plugins.hydra_ray_launcher": "ray"},
    "hydra/launcher=submitit_local": {"hydra_plugins.hydra_submitit_launcher": "slurm"},
    "hydra/launcher=submitit_slurm": {"hydra_plugins.hydra_submitit_launcher": "slurm"},
    "hydra/sweeper=optuna": {"hydra_plugins.hydra_optuna_sweeper": "optuna"},
}


def explain(error: Exception, overrides: Sequence[str], conf_dir: Path) -> str:
    """One line for an error of composing the configuration.

    Args: overrides: the command line, to name the override that was refused.
    """
    if isinstance(error, MissingConfigException):
        return _missing_choice(error, conf_dir)
    for cause in _chain(error):
        if isinstance(cause, ConfigAttributeError | ConfigKeyError):
            return _unknown_key(cause) or _first_line(error)
        if isinstance(cause, ValidationError | UnsupportedValueType):
            return _wrong_type(cause, overrides)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not an override; key=value is expected"
    return _first_line(error)


def _unknown_key(cause: OmegaConfBaseException) -> str | None:
    parent = cause.parent_node
    valid = list(map(str, parent)) if isinstance(parent, DictConfig) else []
    full_key = _full_key(cause) or str(cause.key)
    key = full_key.rsplit(".", 1)[-1].split("/", 1)[0]
    if key in valid or not valid:
        return None
    return f"{full_key}: there is no such setting{nearest(key, valid)}"


def _missing_choice(error: MissingConfigException, conf_dir: Path) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    if not group:
        return _first_line(error)
    wanted = f"{group}={choice}"
    try:
        require(PLUGINS.get(wanted, {}), wanted)
    except UserError as missing:
        return str(missing)
    if not (conf_dir / group).is_dir() and not error.options:
        return f"{group}: there is no such group{nearest(group, (d.name for d in conf_dir.iterdir() if d.is_dir()))}"
    return f"{wanted}: there is no such choice{nearest(choice, error.options or [])}"


def _wrong_type(cause: OmegaConfBaseException, overrides: Sequence[str]) -> str:
    reason = (cause.msg or str(cause)).splitlines()[0]
    key = _full_key(cause)
    given = next((o for o in overrides if o.lstrip("+~").startswith(f"{key}=")), key)
    for kind, expected in EXPECTED.items():
        if f"converted to {kind}" in reason or (kind == "Boolean" and "is not a valid bool" in reason):
            return f"{given}: expected {expected}"
    return f"{given}: {reason}" if given else reason


def _full_key(error: OmegaConfBaseException) -> str | None:
    """The key at which the error is. OmegaConf fills it in while it formats the message."""
    if error.full_key:
        return error.full_key
    for line in str(error).splitlines():
        name, _, value = line.strip().partition(": ")
        if name == "full_key":
            return value
    if error.parent_node is not None and error.key is not None:
        return error.parent_node._get_full_key(error.key)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
