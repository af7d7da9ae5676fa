"""The values that a setting may have, and a field that states them with its default and its meaning."""

import difflib
import math
from dataclasses import MISSING, Field, dataclass, field
from typing import Any, Protocol, cast


class Range(Protocol):
    """A rule over one setting. It is asked about values of the setting's type only."""

    @property
    def words(self) -> str:
        """The range itself, such as `over 0`."""
        ...

    def holds(self, value: Any) -> bool: ...

    def expected(self, value: Any) -> str:
        """The end of the message about a wrong value, such as `expected a number over 0`."""
        ...


@dataclass(frozen=True)
class AtLeast:
    """A finite number from `low` on, and under `below` where that is given."""

    low: float
    below: float = math.inf

    def holds(self, value: float) -> bool:
        return self.low <= value < self.below

    @property
    def words(self) -> str:
        return f"at least {self.low:g}" + ("" if self.below == math.inf else f" and under {self.below:g}")

    def expected(self, value: float) -> str:
        return f"expected a {'whole' if isinstance(value, int) else 'finite'} number, {self.words}"


@dataclass(frozen=True)
class Above:
    """A finite number over `low`, and at most `high` where that is given."""

    low: float
    high: float | None = None

    def holds(self, value: float) -> bool:
        return self.low < value < math.inf and (self.high is None or value <= self.high)

    @property
    def words(self) -> str:
        return f"over {self.low:g}" + ("" if self.high is None else f" and at most {self.high:g}")

    def expected(self, value: float) -> str:
        return f"expected a number {self.words}"


@dataclass(frozen=True)
class Within:
    """A number in low..high, both counted."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def words(self) -> str:
        return f"in {self.low:g}..{self.high:g}"

    def expected(self, value: float) -> str:
        return f"expected a number {self.words}"


@dataclass(frozen=True)
class Finite:
    """A number that is neither infinite nor NaN."""

    def holds(self, value: float) -> bool:
        return math.isfinite(value)

    @property
    def words(self) -> str:
        return "finite"

    def expected(self, value: float) -> str:
        return f"expected a {self.words} number"


@dataclass(frozen=True, init=False)
class OneOf:
    """One of a few texts."""

    choices: tuple[str, ...]

    def __init__(self, *choices: str) -> None:
        object.__setattr__(self, "choices", choices)

    @property
    def words(self) -> str:
        return ", ".join(self.choices)

    def holds(self, value: str) -> bool:
        return value in self.choices

    def expected(self, value: str) -> str:
        close = difflib.get_close_matches(str(value), self.choices, n=1)
        return f"did you mean {close[0]!r}?" if close else f"expected one of {self.words}"


RANGES = {kind.__name__: kind for kind in (AtLeast, Above, Within, Finite, OneOf)}


def setting(default: Any, meaning: str, range: Range | None = None) -> Any:
    """A dataclass field with its meaning, one sentence, and the values it may have.

    A list or a mapping is copied for each object. None passes every range: the field's type says whether it is allowed.

    Example:
        steps: int = setting(25, "Training steps of the run.", AtLeast(1))
    """
    metadata = {"meaning": meaning, "range": range}
    if isinstance(default, list | dict):
        copied = cast(list[Any] | dict[Any, Any], default)
        return field(default_factory=copied.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type) -> Any:
    """A dataclass field that holds a dataclass of settings."""
    return field(default_factory=kind)


def default_of(declared: Field[Any]) -> Any:
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


def meaning_of(declared: Field[Any]) -> str:
    return declared.metadata.get("meaning", "")


def range_of(declared: Field[Any]) -> Range | None:
    return declared.metadata.get("range")
