"""Mathematical equality of a completion's final answer and the gold one.

Numbers with units, percent and currency, and texts, are compared here; algebra, sets, intervals and matrices by the
math-verify library, on the one answer that was found. docs/answers.md says in a table what counts as equal.
"""

import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from rlpost.rewards.answers import LONGEST, AnswerReward, equal_quantities, final_answer, plain, quantity

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs every answer that it cannot parse

EXTRACTION = [LatexExtractionConfig(boxed_match_priority=-1), ExprExtractionConfig()]
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[ -][^\W\d_]{2,})*")
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_BASE = re.compile(r"(-?[0-9A-Fa-f]+)_\{?(\d+)\}?")
_ASSIGNED = re.compile(r"^[a-zA-Z](?:_\{?\w+\}?|\([a-z]\))?\s*(?:=|\\in)\s*(?=[^=])")
_POWER = r"\s*(?:\^|\*\*)\s*[{(]?\s*"
# Numbers that would keep Python busy for longer than the universe, deaf to signals.
_HUGE = re.compile(rf"{_POWER}-?\d{{4,}}|\d{{4,}}\s*\}}?\s*!|!\s*[)}}]?\s*!|\d{{50,}}")
_TOWER = re.compile(rf"\d+(?:{_POWER}\d+){{2,}}")
LARGEST_EXPONENT = 5000


@dataclass(frozen=True)
class MathReward(AnswerReward):
    """1 where the answers are equal, else 0; None where the gold cannot be read.

    Attributes:
        seconds: how long one comparison may take; one that takes longer is not equal.
    """

    requires_packages: ClassVar[Mapping[str, str]] = {"math_verify": "math"}

    seconds: int = 3

    def _score(self, completion: str, answer: str | None, question: str) -> float | None:
        gold = None if answer is None else _Gold.read(answer, self)
        if gold is None:
            return None
        found = final_answer(completion, self.sources, question)
        return float(found is not None and gold.equals(plain(found), self))

    def parsed(self, text: str) -> list[Any]:
        """The text as math-verify reads it; empty if it cannot, or if the text is not worth its time."""
        if len(text) > LONGEST or text.count("^") > 8 or _depth(text) > 12 or _is_huge(text):
            return []
        # In other threads there are no signals to end it; the scoring process is then ended as a whole.
        limit = self.seconds if threading.current_thread() is threading.main_thread() else None
        listed = re.sub(r"\s+(?:or|and)\s+", ", ", text)
        return parse(f"${listed}$", EXTRACTION, "no_fallback", "first_match", limit)  # pyright: ignore[reportArgumentType] - None is none

    def verified(self, gold: list[Any], found: list[Any]) -> bool:
        limit = self.seconds if threading.current_thread() is threading.main_thread() else None
        return bool(found) and verify(gold, found, float_rounding=self.precision, timeout_seconds=limit)


@dataclass(frozen=True)
class _Gold:
    """A gold answer, read once: as words, as a quantity, or by math-verify."""

    text: str
    quantity: Any
    parsed: list[Any]

    @classmethod
    def read(cls, answer: str, reward: MathReward) -> "_Gold | None":
        text = plain(answer)
        number = quantity(text)
        parsed = [] if number or _is_words(text) else reward.parsed(text)
        return cls(text, number, parsed) if number or parsed or _is_words(text) else None

    def equals(self, found: str, reward: MathReward) -> bool:
        if _folded(found) == _folded(self.text):
            return True
        if _is_words(self.text):
            return False
        if (base := _BASE.fullmatch(self.text)) is not None:  # to math-verify a subscript is a name's
            theirs = _BASE.fullmatch(_unassigned(found))
            return theirs is not None and base.groups() == theirs.groups()
        behind = _unassigned(found) if "=" not in self.text and "\\in" not in self.text else found
        number = quantity(behind)
        mine = self.quantity or quantity(_unassigned(self.text))
        if mine and number:
            return equal_quantities(mine, number, reward.percent, reward.precision)
        if self.quantity is None and _CHOICE.fullmatch(self.text):
            return False
        gold = self.parsed or reward.parsed(re.sub(r"[$%]", "", self.text))
        return reward.verified(gold, reward.parsed(found.replace("$", "")))


def _is_words(text: str) -> bool:
    """True if a text is words, such as names, days, yes and no, in which letters would only be multiplied.

    Two letters may be a product.
    """
    return len(text) > 2 and _WORDS.fullmatch(text) is not None


def _folded(text: str) -> str:
    """Without case where it means nothing: in words and choices, not in formulas."""
    if choice := re.fullmatch(r"(?:(?:option|choice) )?(\(?)([a-z])(\)?)", text.casefold()):
        opening, letter, closing = choice.groups()
        if opening or closing or letter in "abcde" or len(text) > 1:
            return letter
    return text.casefold() if _is_words(text) else re.sub(r"\s+", "", text)


def _is_huge(text: str) -> bool:
    if _HUGE.search(text):
        return True
    for tower in _TOWER.finditer(text):
        *bases, exponent = [int(number) for number in re.findall(r"\d+", tower.group())][1:]
        for base in reversed(bases):
            if exponent > LARGEST_EXPONENT or (base > 1 and exponent > 20):
                return True
            exponent = base**exponent
        if exponent > LARGEST_EXPONENT:
            return True
    return False


def _unassigned(text: str) -> str:
    return _ASSIGNED.sub("", text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest
