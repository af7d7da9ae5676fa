"""The number that a completion ends up with, compared with the gold number. No algebra: `math` has that."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.rewards.answers import (
    DEFAULT_SOURCES,
    Percent,
    Source,
    check_sources,
    equal_quantities,
    final_answer,
    one_number,
)


@dataclass(frozen=True)
class NumberReward:
    """1 where the completion's number equals the gold answer's, else 0; None where the gold is no number.

    Attributes:
        sources: where a final answer is looked for, in this order (`answers.final_answer`).
        percent: drop: 25% is 25; hundredth: 25% is 0.25.
        precision: decimals to which numbers are compared.
    """

    sources: Sequence[Source] = DEFAULT_SOURCES
    percent: Percent = "drop"
    precision: int = 6

    def __post_init__(self) -> None:
        check_sources(self.sources, "reward.number.sources")

    def __call__(
        self,
        *,
        completions: list[str],
        answers: list[str | None],
        messages: list[list[dict[str, Any]]] | None = None,
        **_: Any,
    ) -> list[float | None]:
        questions = [m[-1]["content"] if m else "" for m in messages or [[]] * len(completions)]
        return [self._score(*row) for row in zip(completions, answers, questions, strict=True)]

    def _score(self, completion: str, answer: str | None, question: str) -> float | None:
        gold = None if answer is None else one_number(answer)
        if gold is None:
            return None
        found = final_answer(completion, self.sources, question)
        number = None if found is None else one_number(found)
        return float(number is not None and equal_quantities(gold, number, self.percent, self.precision))
