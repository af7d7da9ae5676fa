"""A regular expression the completion has to match."""

import re
from dataclasses import dataclass
from typing import Any

from rlpost.errors import UserError


@dataclass(frozen=True)
class FormatReward:
    """1 where `pattern` matches the completion, else 0.

    Attributes:
        pattern: a regular expression; `.` matches line breaks.
        whole: the whole completion must match, else any part of it.
    """

    pattern: str
    whole: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(f"reward pattern {self.pattern!r}: not a regular expression ({error})") from None

    def __call__(self, *, completions: list[str], **_: Any) -> list[float]:
        pattern = re.compile(self.pattern, re.DOTALL)
        match = pattern.fullmatch if self.whole else pattern.search
        return [float(match(completion.strip()) is not None) for completion in completions]
