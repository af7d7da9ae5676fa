"""One worked example of each hook. The configuration beside this file uses them all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlpost.objective.corrections import CorrectionOutput
from rlpost.objective.losses import TokenLoss
from rlpost.types import Rollout, StepTotals, TokenView


@dataclass(frozen=True)
class SquaredRatioLoss:
    """A loss: the surrogate with a quadratic pull of the ratio towards 1 instead of a clip."""

    pull: float = 0.5

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tokens: TokenView) -> TokenLoss:
        ratio = torch.exp(logprobs - old_logprobs)
        never = torch.zeros_like(ratio, dtype=torch.bool)
        loss = -ratio * advantages + self.pull * (ratio - 1) ** 2
        return TokenLoss(loss, ratio.detach(), never, never)


@dataclass(frozen=True)
class RootLength:
    """A reducer: each sequence's token sum over the square root of its length, half-way between grpo and drgrpo."""

    def __call__(self, tokens: TokenView, totals: StepTotals) -> Tensor:
        lengths = tokens.active_lengths.clamp(min=1).double()[tokens.sequence_index]
        return tokens.loss_mask / (totals.num_sequences * lengths.sqrt())


@dataclass(frozen=True)
class RankAdvantage:
    """An advantage: the rank within the group, from -1 to 1; ties share the middle of their ranks."""

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        same = group_ids.unsqueeze(0) == group_ids.unsqueeze(1)
        above = (same & (rewards.unsqueeze(1) > rewards.unsqueeze(0))).sum(1)
        below = (same & (rewards.unsqueeze(1) < rewards.unsqueeze(0))).sum(1)
        others = (same & ~torch.isnan(rewards)).sum(1).sub(1).clamp(min=1)
        return torch.where(torch.isnan(rewards), 0.0, (above - below).double() / others)


@dataclass(frozen=True)
class DropUnlikely:
    """A correction: tokens that the engine itself found very unlikely give no gradient."""

    min_logprob: float = -15.0

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, tokens: TokenView
    ) -> CorrectionOutput:
        cut = rollout_logprobs < self.min_logprob
        return CorrectionOutput((~cut).to(logprobs.dtype), cut)


@dataclass(frozen=True)
class NotAllTruncated:
    """A sample filter: groups of which no completion ended by itself are left out."""

    def __call__(self, group: Sequence[Rollout]) -> bool:
        return any(rollout.completion.finish_reason == "stop" for rollout in group)


@dataclass(frozen=True)
class Squash:
    """Reward post-processing: large rewards count less."""

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [rollout.reward / (1 + abs(rollout.reward)) for rollout in rollouts]


@dataclass(frozen=True)
class Vowels:
    """A reward: the share of vowels."""

    def __call__(self, *, completions: list[str], **columns: list[Any]) -> list[float | None]:
        return [sum(c in "aeiou" for c in text) / len(text) if text else None for text in completions]
