"""Reducers: the weight of each token in the step's policy-gradient loss.

The step's loss is (token_loss * weight).sum() over all micro-batches and ranks. Weights come from the totals
of the whole optimizer step, so no split of the batch can change them. Masked tokens weigh 0; a sequence whose
tokens are all masked still counts in N.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlpost.types import StepTotals, TokenView


class Reducer(Protocol):
    def __call__(self, tokens: TokenView, totals: StepTotals) -> Tensor: ...  # [T] float64 weights


@dataclass(frozen=True)
class SequenceMean:
    """1 / (N * len_i): mean over sequences of each one's token mean (GRPO, arXiv:2402.03300, eq. 3).

    Every reported metric uses it too, whatever reducer the loss has, so that runs stay comparable.
    """

    def __call__(self, tokens: TokenView, totals: StepTotals) -> Tensor:
        lengths = tokens.active_lengths.clamp(min=1).double()[tokens.sequence_index]
        return tokens.loss_mask / (totals.num_sequences * lengths)


@dataclass(frozen=True)
class ConstantDivisor:
    """1 / (N * divisor): each sequence's token sum over a constant (Dr. GRPO, arXiv:2503.20783)."""

    divisor: float = 1000

    def __post_init__(self) -> None:
        if not self.divisor > 0:
            raise ValueError(f"divisor must be over zero, not {self.divisor}")

    def __call__(self, tokens: TokenView, totals: StepTotals) -> Tensor:
        return tokens.loss_mask.double() / (totals.num_sequences * self.divisor)


@dataclass(frozen=True)
class TokenMean:
    """1 / M: mean over all active tokens of the step (DAPO, arXiv:2503.14476, eq. 8)."""

    def __call__(self, tokens: TokenView, totals: StepTotals) -> Tensor:
        return tokens.loss_mask.double() / max(totals.num_tokens, 1)


@dataclass(frozen=True)
class TokenSum:
    """1: plain sum over all active tokens."""

    def __call__(self, tokens: TokenView, totals: StepTotals) -> Tensor:
        return tokens.loss_mask.to(torch.float64)
