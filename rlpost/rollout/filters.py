"""Sample filters and reward post-processing: what happens to rollouts between their rewards and their advantages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from rlpost.config.ranges import Above, AtLeast
from rlpost.types import Rollout


class GroupFilter(Protocol):
    def __call__(self, group: Sequence[Rollout]) -> bool:
        """The decision to train on a group, given all of its rollouts, rewards set."""
        ...


class RewardProcessor(Protocol):
    def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """The rewards to train on, one a rollout, NaN where none applies; `reward` holds the ones so far."""
        ...


@dataclass(frozen=True)
class VariedRewards:
    """Keep groups whose rewards differ; the others have advantage 0 (DAPO's dynamic sampling, arXiv:2503.14476, eq. 11)."""

    def __call__(self, group: Sequence[Rollout]) -> bool:
        return len({rollout.reward for rollout in group if not math.isnan(rollout.reward)}) > 1


@dataclass(frozen=True)
class SoftOverlongPenalty:
    """A penalty that grows over the last part of the length limit (DAPO, arXiv:2503.14476, eq. 13).

    The penalty is 0 up to (1 - share) * max_tokens tokens, and falls linearly to -weight at max_tokens.

    Attributes:
        max_tokens: the longest completion allowed, in tokens.
        share: the part of max_tokens over which the penalty grows; the paper has 4096 of 20480 tokens.
        weight: the penalty of a completion of max_tokens.
    """

    max_tokens: Annotated[int, AtLeast(1)]
    share: Annotated[float, Above(0, 1)] = 0.2
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be over 0 and at most 1, not {self.share}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [r.reward - self.weight * self._overlong(len(r.completion.token_ids)) for r in rollouts]

    def _overlong(self, length: int) -> float:
        buffer = self.share * self.max_tokens
        return min(1.0, max(0.0, (length - (self.max_tokens - buffer)) / buffer))
