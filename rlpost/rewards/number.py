"""The last number of an answer, compared with the gold number."""

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")


def last_number(text: str) -> Decimal | None:
    """The last number written in a text, thousands separators read; None if there is none.

    A sign counts unless a digit stands before it: "7-3" ends in 3, not in -3.
    """
    found = None
    for match in NUMBER.finditer(text):
        found = match
    if found is None:
        return None
    digits = found.group().replace(",", "")
    if digits[0] in "+-" and found.start() > 0 and text[found.start() - 1].isdigit():
        digits = digits[1:]
    try:
        return Decimal(digits)
    except InvalidOperation:
        return None


@dataclass(frozen=True)
class NumberReward:
    """1 where the completion's last number equals the gold answer's, else 0; None where the gold has no number."""

    def __call__(self, *, completions: list[str], answers: list[str | None], **_: Any) -> list[float | None]:
        return [self._score(c, a) for c, a in zip(completions, answers, strict=True)]

    def _score(self, completion: str, answer: str | None) -> float | None:
        gold = None if answer is None else last_number(answer)
        return None if gold is None else float(last_number(completion) == gold)
