"""Per-token policy-gradient losses. None of them divides: a reducer weighs their tokens."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """What a loss gives for each of T tokens."""

    loss: Tensor  # [T], differentiable
    ratio: Tensor  # [T], pi / pi_old, detached
    clipped_low: Tensor  # [T] bool: the lower bound stopped this token's gradient
    clipped_high: Tensor  # [T] bool: the upper bound did


class Loss(Protocol):
    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLoss: ...


@dataclass(frozen=True)
class ClippedLoss:
    """The clipped surrogate of PPO (arXiv:1707.06347, eq. 7), with separate bounds (DAPO, arXiv:2503.14476).

    loss = -min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A), ratio = exp(logprob - old_logprob).
    """

    eps_low: float = 0.2
    eps_high: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.eps_low <= 1:
            raise ValueError(f"eps_low must lie in 0..1, not {self.eps_low}")
        if self.eps_high < 0:
            raise ValueError(f"eps_high must not be negative, not {self.eps_high}")

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
        """Args: all [T]; only `logprobs` carries a gradient."""
        ratio = torch.exp(logprobs - old_logprobs)
        clipped_ratio = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
        ratio = ratio.detach()
        return TokenLoss(
            loss=loss,
            ratio=ratio,
            clipped_low=(ratio < 1 - self.eps_low) & (advantages < 0),
            clipped_high=(ratio > 1 + self.eps_high) & (advantages > 0),
        )
