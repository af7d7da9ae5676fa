"""Per-token policy-gradient losses. None of them divides by a length or a count: a reducer weighs their tokens."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from rlpost.config.ranges import Above, AtLeast, Within
from rlpost.objective.ratios import log_ratio, ratio_of
from rlpost.objective.sequences import per_token, sequence_mean
from rlpost.types import TokenView


class TokenLoss(NamedTuple):
    """A loss's values for each of T tokens."""

    loss: Tensor  # [T], differentiable
    ratio: Tensor  # [T], pi / pi_old as the loss uses it, detached
    clipped_low: Tensor  # [T] bool: the lower bound cut this token's gradient
    clipped_high: Tensor  # [T] bool: the upper bound did


class Loss(Protocol):
    """A loss whose gradient is exactly 0 where the advantage is may say so with `zero_at_zero_advantage = True`: the
    trainer then leaves out the backward pass of groups without one."""

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tokens: TokenView) -> TokenLoss:
        """Args: the first three [T]; only `logprobs` carries a gradient."""
        ...


@dataclass(frozen=True)
class ClippedLoss:
    """The clipped surrogate of PPO (arXiv:1707.06347, eq. 7), with separate bounds (DAPO, arXiv:2503.14476, eq. 8).

    loss = -min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A), ratio = exp(logprob - old_logprob).

    Attributes:
        eps_low, eps_high: the bounds on the ratio, 1 - eps_low and 1 + eps_high.
        dual_clip: where A < 0 the loss is at most dual_clip * |A| (arXiv:1912.09729, eq. 5); over 1, None is off.
        ratio_cap: the unclipped term takes ratios up to this (INTELLECT-2, arXiv:2505.07291: two-sided clipping);
            over 1 + eps_high, None is off.
    """

    zero_at_zero_advantage: ClassVar[bool] = True

    eps_low: Annotated[float, Within(0, 1)] = 0.2
    eps_high: Annotated[float, AtLeast(0)] = 0.2
    dual_clip: Annotated[float, Above(1)] | None = None
    ratio_cap: Annotated[float, Above(1)] | None = None

    def __post_init__(self) -> None:
        _check_bounds(self.eps_low, self.eps_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be over 1, or null, not {self.dual_clip}")
        if self.ratio_cap is not None and not self.ratio_cap > 1 + self.eps_high:
            raise ValueError(
                f"ratio_cap must be over 1 + eps_high = {1 + self.eps_high:g}, or null, not {self.ratio_cap}"
            )

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tokens: TokenView) -> TokenLoss:
        ratio = ratio_of(log_ratio(logprobs, old_logprobs, tokens), tokens)
        capped = ratio if self.ratio_cap is None else ratio.clamp(max=self.ratio_cap)
        loss, low, high = _clipped(ratio, capped, advantages, self.eps_low, self.eps_high)
        if self.ratio_cap is not None:
            high = high | ((ratio > self.ratio_cap) & (advantages < 0))
        if self.dual_clip is not None:
            bound = -self.dual_clip * advantages
            stopped = (advantages < 0) & (loss > bound)
            loss = torch.where(stopped, bound, loss)
            high = high | stopped
        return TokenLoss(loss, ratio.detach(), low, high)


@dataclass(frozen=True)
class GSPOLoss:
    """Group sequence policy optimization (arXiv:2507.18071): the ratio of a whole sequence, per token.

    s_i = exp(mean over the sequence's active tokens of (logprob - old_logprob)), eq. 7; the loss of each of its tokens
    is the clipped surrogate of s_i (eq. 5). With `variant="token"` a token's ratio is sg[s_i] * pi / sg[pi] (eq. 14):
    the same value, and a gradient that a per-token advantage would weigh.

    Attributes:
        eps_low, eps_high: the bounds on the sequence's ratio, 1 - eps_low and 1 + eps_high.
        variant: the gradient is that of the sequence's ratio, or each token's own.
    """

    zero_at_zero_advantage: ClassVar[bool] = True

    eps_low: Annotated[float, Within(0, 1)] = 3e-4
    eps_high: Annotated[float, AtLeast(0)] = 4e-4
    variant: Literal["sequence", "token"] = "sequence"

    def __post_init__(self) -> None:
        _check_bounds(self.eps_low, self.eps_high)
        if self.variant not in ("sequence", "token"):
            raise ValueError(f"variant must be 'sequence' or 'token', not {self.variant!r}")

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tokens: TokenView) -> TokenLoss:
        ratio = per_token(ratio_of(sequence_mean(logprobs - old_logprobs, tokens), tokens), tokens)
        if self.variant == "token":
            ratio = ratio.detach() * ratio_of(log_ratio(logprobs, logprobs.detach(), tokens), tokens)
        loss, low, high = _clipped(ratio, ratio, advantages, self.eps_low, self.eps_high)
        return TokenLoss(loss, ratio.detach(), low, high)


@dataclass(frozen=True)
class CISPOLoss:
    """Clipped importance weights, not clipped updates (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5).

    loss = -sg[clip(ratio, 1 - eps_low, 1 + eps_high)] * A * logprob: every token keeps a gradient. The paper sets no
    lower bound (eps_low = 1).

    Attributes: eps_low, eps_high: the bounds on the weight, 1 - eps_low and 1 + eps_high.
    """

    zero_at_zero_advantage: ClassVar[bool] = True

    eps_low: Annotated[float, Within(0, 1)] = 1.0
    eps_high: Annotated[float, AtLeast(0)] = 4.0

    def __post_init__(self) -> None:
        _check_bounds(self.eps_low, self.eps_high)

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tokens: TokenView) -> TokenLoss:
        ratio = ratio_of(log_ratio(logprobs.detach(), old_logprobs, tokens), tokens)
        weight = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        loss = -weight * advantages * logprobs
        return TokenLoss(loss, ratio, ratio < 1 - self.eps_low, ratio > 1 + self.eps_high)


@dataclass(frozen=True)
class SAPOLoss:
    """Soft adaptive policy optimization (arXiv:2511.20347, eq. 5 and 6): a sigmoid gate in place of a clip.

    loss = -(4 / tau) * sigmoid(tau * (ratio - 1)) * A, tau = tau_positive where A > 0, else tau_negative. The gate's
    slope at ratio 1 is 1, so on-policy its gradient is REINFORCE's.

    Attributes: tau_positive, tau_negative: how steep the gate is where the advantage is positive, and where it is not.
    """

    zero_at_zero_advantage: ClassVar[bool] = True

    tau_positive: Annotated[float, Above(0)] = 1.0
    tau_negative: Annotated[float, Above(0)] = 1.05

    def __post_init__(self) -> None:
        if not (self.tau_positive > 0 and self.tau_negative > 0):
            raise ValueError(f"tau_positive and tau_negative must be over 0: {self.tau_positive}, {self.tau_negative}")

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tokens: TokenView) -> TokenLoss:
        ratio = ratio_of(log_ratio(logprobs, old_logprobs, tokens), tokens)
        positive, negative = ratio.new_tensor(self.tau_positive), ratio.new_tensor(self.tau_negative)
        tau = torch.where(advantages > 0, positive, negative)
        loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
        never = torch.zeros_like(ratio, dtype=torch.bool)
        return TokenLoss(loss, ratio.detach(), never, never)


@dataclass(frozen=True)
class ReinforceLoss:
    """REINFORCE (Williams, 1992): loss = -A * logprob, with no ratio: exact for one optimizer step a rollout batch."""

    zero_at_zero_advantage: ClassVar[bool] = True

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tokens: TokenView) -> TokenLoss:
        ratio = ratio_of(log_ratio(logprobs.detach(), old_logprobs, tokens), tokens)
        never = torch.zeros_like(ratio, dtype=torch.bool)
        return TokenLoss(-advantages * logprobs, ratio, never, never)


def _clipped(
    ratio: Tensor, unclipped: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-min(unclipped * A, clip(ratio) * A), and where the lower and the upper bound took the gradient away."""
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    loss = -torch.minimum(unclipped * advantages, clipped * advantages)
    low = (ratio < 1 - eps_low) & (advantages < 0)
    high = (ratio > 1 + eps_high) & (advantages > 0)
    return loss, low.detach(), high.detach()


def _check_bounds(eps_low: float, eps_high: float) -> None:
    if not 0 <= eps_low <= 1:
        raise ValueError(f"eps_low must lie in 0..1, not {eps_low}")
    if not (eps_high >= 0 and math.isfinite(eps_high)):
        raise ValueError(f"eps_high must be finite and not negative, not {eps_high}")
