"""Several reward functions, one reward."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlpost.types import Rollout


class RewardFunction(Protocol):
    def __call__(
        self, *, prompts: list[str], completions: list[str], answers: list[str | None], **columns: list[Any]
    ) -> Sequence[float | None]:
        """One number a completion, or None where the function does not apply.

        Args:
            prompts: the rendered prompts.
            completions: the whole answers, the completion prefix included.
            answers: the gold answers.
            columns: the task's other columns, None for a row without the column.
        """
        ...


class RewardSum:
    """The weighted sum of the functions that apply to a rollout; NaN where none does."""

    def __init__(self, functions: Mapping[str, RewardFunction], weights: Mapping[str, float]) -> None:
        self._functions = dict(functions)
        self._weights = dict(weights)

    @property
    def weights(self) -> list[float]:
        """One a function, in the order of a rollout's `rewards`."""
        return [self._weights[name] for name in self._functions]

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """Set `rewards` and `reward` of every rollout.

        Raises: ValueError naming the function if it returns another number of values than it was given.
        """
        if not rollouts:
            return
        examples = [rollout.prompt.example for rollout in rollouts]
        names = {name for example in examples for name in example.columns}
        arguments = {
            **{name: [example.columns.get(name) for example in examples] for name in sorted(names)},
            "prompts": [rollout.prompt.text for rollout in rollouts],
            "completions": [rollout.answer_text for rollout in rollouts],
            "answers": [example.answer for example in examples],
        }
        for name, function in self._functions.items():
            values = list(function(**arguments))
            if len(values) != len(rollouts):
                raise ValueError(f"reward.{name} gave {len(values)} values for {len(rollouts)} completions")
            for rollout, value in zip(rollouts, values, strict=True):
                rollout.rewards[name] = math.nan if value is None else float(value)
        for rollout in rollouts:
            parts = [self._weights[name] * value for name, value in rollout.rewards.items() if not math.isnan(value)]
            rollout.reward = math.fsum(parts) if parts else math.nan
