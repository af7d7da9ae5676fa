"""The score that a reasoning-gym dataset gives its own entries."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from reasoning_gym import get_score_answer_fn


@dataclass(frozen=True)
class ReasoningGymReward:
    """The dataset's own score, in 0..1; None for an example of another task.

    Attributes:
        marker: the answer is what follows the last occurrence of this text; all of the completion without one.
    """

    requires_packages: ClassVar[Mapping[str, str]] = {"reasoning_gym": "reasoning-gym"}

    marker: str = "Answer:"
    _scorers: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __call__(
        self,
        *,
        completions: list[str],
        dataset: list[str | None] | None = None,
        entry: list[dict[str, Any] | None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        if dataset is None or entry is None:
            return [None] * len(completions)
        return [self._score(*row) for row in zip(completions, dataset, entry, strict=True)]

    def _score(self, completion: str, dataset: str | None, entry: dict[str, Any] | None) -> float | None:
        if dataset is None or entry is None:
            return None
        if dataset not in self._scorers:
            self._scorers[dataset] = get_score_answer_fn(dataset)
        answer = completion.rsplit(self.marker, 1)[-1].strip()
        return float(self._scorers[dataset](answer, entry))
