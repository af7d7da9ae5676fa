"""Mathematical equality of a completion's final answer and the gold one, by the math-verify library."""

import logging
from dataclasses import dataclass
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs every answer that it cannot parse


@dataclass(frozen=True)
class MathReward:
    """1 where math-verify finds the answers equal, else 0; None where the gold cannot be parsed.

    Attributes: precision: decimals to which numbers are compared.
    """

    precision: int = 6

    def __call__(self, *, completions: list[str], answers: list[str | None], **_: Any) -> list[float | None]:
        return [self._score(c, a) for c, a in zip(completions, answers, strict=True)]

    def _score(self, completion: str, answer: str | None) -> float | None:
        gold = [] if answer is None else self._parse(f"${answer}$") or self._parse(answer)
        if not gold:
            return None
        # Signal-based time-outs work in the main thread only; rewards may be scored elsewhere.
        return float(verify(gold, self._parse(completion), float_rounding=self.precision, timeout_seconds=None))

    def _parse(self, text: str) -> list[Any]:
        return parse(text, parsing_timeout=None)
