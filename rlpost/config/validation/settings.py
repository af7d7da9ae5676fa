"""Rules over single settings: that they exist, and that their values lie in their ranges."""

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig

from rlpost.config.ranges import range_of
from rlpost.errors import UserError, nearest


def check_known_keys(cfg: DictConfig, schema: type, prefix: str) -> None:
    """`+key=value` adds keys that the schema does not have; a misspelt setting must not pass that way."""
    hints = get_type_hints(schema)
    known = [f.name for f in fields(schema)]
    for key in map(str, cfg):
        if key not in known:
            raise UserError(f"{prefix}{key}: there is no such setting{nearest(key, known)}")
        if is_dataclass(hints[key]):
            check_known_keys(cfg[key], hints[key], f"{prefix}{key}.")


def check_ranges(section: Any, prefix: str) -> None:
    """Hold every setting of a section, and of the sections in it, to the range that its field states."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            check_ranges(value, f"{prefix}{field.name}.")
            continue
        range_ = range_of(field)
        if range_ is not None and value is not None and not range_.holds(value):
            raise UserError(f"{prefix}{field.name}={value}: {range_.expected(value)}")
