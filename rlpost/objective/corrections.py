"""Corrections for tokens that another policy sampled than the one being trained. They change the loss's numerator only.

The engine samples with slightly other numbers than the trainer computes (precision, kernels), and a stale engine with
older weights. A correction gives each token a multiplier for its loss, and says which tokens it cut.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from rlpost.config.ranges import AtLeast, Within
from rlpost.objective.sequences import per_token, sequence_mean, sequence_sum
from rlpost.types import TokenView


class CorrectionOutput(NamedTuple):
    multiplier: Tensor  # [T], no gradient
    cut: Tensor  # [T] bool: bounded or masked


class Correction(Protocol):
    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        advantages: Tensor,
        tokens: TokenView,
    ) -> CorrectionOutput:
        """Args: all [T], detached: by the current policy, by the trainer before the update, by the engine."""
        ...


@dataclass(frozen=True)
class ImportanceSampling:
    """Truncated or masked importance sampling between trainer and engine (fengyao.notion.site/off-policy-rl, 2025).

    w = exp(old_logprob - rollout_logprob), of a token, of its sequence (the product over its active tokens) or as their
    geometric mean. All bounds are applied to log w, so a product over a long sequence cannot overflow.

    Attributes:
        level: "token", "sequence" or "geometric".
        mode: "truncate" bounds w; "mask" gives a token whose w is out of bounds no loss (MIS, IcePop).
        low, high: the bounds on w; low 0 is none.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    low: Annotated[float, Within(0, 1)] = 0.0
    high: Annotated[float, AtLeast(1)] = 2.0

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence", "geometric"):
            raise ValueError(f"level must be token, sequence or geometric, not {self.level!r}")
        if self.mode not in ("truncate", "mask"):
            raise ValueError(f"mode must be truncate or mask, not {self.mode!r}")
        if not (0 <= self.low <= 1 <= self.high and math.isfinite(self.high)):
            raise ValueError(f"0 <= low <= 1 <= high is needed, not low={self.low}, high={self.high}")

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        advantages: Tensor,
        tokens: TokenView,
    ) -> CorrectionOutput:
        log_weight = old_logprobs - rollout_logprobs.to(old_logprobs.dtype)
        if self.level == "sequence":
            log_weight = per_token(sequence_sum(log_weight, tokens), tokens)
        elif self.level == "geometric":
            log_weight = per_token(sequence_mean(log_weight, tokens), tokens)
        log_low = math.log(self.low) if self.low > 0 else -math.inf
        # Not "< low or > high": a NaN, from a logprob that the engine failed to give, is out of bounds too.
        inside = (log_weight >= log_low) & (log_weight <= math.log(self.high))
        bounded = torch.exp(log_weight.clamp(log_low, math.log(self.high)))
        keep = inside if self.mode == "mask" else ~torch.isnan(log_weight)
        return CorrectionOutput(torch.where(keep, bounded, 0.0), ~inside)


@dataclass(frozen=True)
class OffPolicySequenceMask:
    """Leave out sequences with a negative advantage that the policy has moved away from (DeepSeek-V3.2, arXiv:2512.02556).

    A sequence is cut where A < 0 and the mean over its active tokens of (rollout_logprob - logprob) is over `threshold`.
    """

    threshold: Annotated[float, AtLeast(0)] = 0.1

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"threshold must not be negative, not {self.threshold}")

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        advantages: Tensor,
        tokens: TokenView,
    ) -> CorrectionOutput:
        drift = per_token(sequence_mean(rollout_logprobs.to(logprobs.dtype) - logprobs, tokens), tokens)
        kept = (advantages >= 0) | (drift <= self.threshold)  # a NaN drift is cut
        return CorrectionOutput(kept.to(logprobs.dtype), ~kept)
