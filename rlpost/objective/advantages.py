"""Advantages: how much better a completion did than was to be expected.

All see the whole step, over all ranks. A reward of NaN (no function applies) is left out of every mean and deviation and
has advantage 0. All compute in float64. A group of one, and a group whose rewards are all equal, give exactly 0 wherever
the baseline is the group's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor

from rlpost.config.ranges import Above, AtLeast
from rlpost.types import Stateful

WHITENING_EPS = 1e-4  # as the advantage within a group has it by default


class Advantage(Protocol):
    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor: ...  # [N] float64, [N] int64 -> [N] float64


@dataclass(frozen=True)
class GroupAdvantage:
    """Reward minus the group's mean, over a standard deviation (GRPO, arXiv:2402.03300, sec. 4.1.2).

    A = (r - mean_group) / (std + eps). Deviations are sample deviations (n - 1).

    Attributes:
        normalize: "group": by the group's deviation; "batch": by that of all rewards of the step; "none": A = r -
            mean_group (Dr. GRPO, arXiv:2503.20783).
        eps: keeps nearly equal rewards from being blown up.
    """

    is_group_relative: ClassVar[bool] = True

    normalize: Literal["group", "batch", "none"] = "group"
    eps: Annotated[float, AtLeast(0)] = 1e-4

    def __post_init__(self) -> None:
        if self.normalize not in ("group", "batch", "none"):
            raise ValueError(f"normalize must be 'group', 'batch' or 'none', not {self.normalize!r}")
        _check_eps(self.eps)

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        advantages = torch.zeros(len(rewards), dtype=torch.float64)
        batch_std = _std(rewards[~torch.isnan(rewards)].double())
        for members, group in _varied_groups(rewards, group_ids):
            centred = group - group.mean()
            if self.normalize == "group":
                centred = centred / (group.std() + self.eps)
            elif self.normalize == "batch":
                centred = centred / (batch_std + self.eps)
            advantages[members] = centred
        return advantages


@dataclass(frozen=True)
class LeaveOneOut:
    """Reward minus the mean of the group's other rewards (RLOO, arXiv:2402.14740, eq. 8): n / (n - 1) (r - mean)."""

    is_group_relative: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        advantages = torch.zeros(len(rewards), dtype=torch.float64)
        for members, group in _varied_groups(rewards, group_ids):
            n = len(group)
            advantages[members] = (group - group.mean()) * (n / (n - 1))
        return advantages


@dataclass(frozen=True)
class ReinforcePlusPlus:
    """REINFORCE++ with baseline (arXiv:2501.03262v3, sec. 3.2): r - mean_group, then normalised over the whole step.

    A = (a - mean_step(a)) / (std_step(a) + eps) with a = r - mean_group.

    Attributes: eps: a constant added to the deviation, so that equal rewards are not divided by 0.
    """

    is_group_relative: ClassVar[bool] = True

    eps: Annotated[float, AtLeast(0)] = 1e-8

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        applies = ~torch.isnan(rewards)
        centred = GroupAdvantage(normalize="none")(rewards, group_ids)
        known = centred[applies]
        if not known.any():
            return centred
        return torch.where(applies, (centred - known.mean()) / (_std(known) + self.eps), 0.0)


@dataclass(frozen=True)
class RawReward:
    """The reward itself: plain REINFORCE (Williams, 1992).

    Attributes: centre: the step's mean reward is taken off, as a baseline.
    """

    centre: bool = False

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        rewards = rewards.double()
        applies = ~torch.isnan(rewards)
        baseline = rewards[applies].mean() if self.centre and applies.any() else 0.0
        return torch.where(applies, rewards - baseline, 0.0)


@dataclass
class BetaNormalized:
    """Beta normalisation (BNPO, arXiv:2506.02864): advantages for binary rewards, weighed by how hard the prompt is.

    With a group's success rate p, A = (R - p) / BetaPDF(p; alpha, beta). The success rates of the last `window` steps
    are taken as drawn from Beta(a, b), fitted by moments, and alpha = 1 + a / 3, beta = 1 + b / 3 (at least 1), which
    minimises the gradient's variance (theorem 1). alpha = beta = 1 is REINFORCE with a baseline, alpha = beta = 3/2 is
    GRPO up to a constant: the density is then proportional to the deviation sqrt(p (1 - p)).

    Attributes:
        low, high: the rewards' range, mapped to [0, 1]; a reward outside is refused.
        window: steps whose success rates are kept.
        max_weight: bound on 1 / BetaPDF, which grows without one where p is rare.
        alpha, beta: fixed parameters instead of fitted ones; both or neither.
    """

    is_group_relative: ClassVar[bool] = True

    low: float = 0.0
    high: float = 1.0
    window: Annotated[int, AtLeast(1)] = 8
    max_weight: Annotated[float, Above(0)] = 10.0
    alpha: Annotated[float, AtLeast(1)] | None = None
    beta: Annotated[float, AtLeast(1)] | None = None
    _rates: list[list[float]] = field(default_factory=list, init=False)  # success rates, a list a step

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low={self.low} must be under high={self.high}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}")
        if not self.max_weight > 0:
            raise ValueError(f"max_weight must be over 0, not {self.max_weight}")
        if (self.alpha is None) != (self.beta is None):
            raise ValueError("alpha and beta are set together, or neither")
        if self.alpha is not None and self.beta is not None and not (self.alpha >= 1 and self.beta >= 1):
            raise ValueError(f"alpha and beta must be at least 1, not {self.alpha} and {self.beta}")

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Raises: ValueError for a reward outside low..high."""
        known = rewards[~torch.isnan(rewards)]
        if len(known) and not (known.min() >= self.low and known.max() <= self.high):
            raise ValueError(
                f"rewards lie in {known.min():g}..{known.max():g}, outside algorithm.advantage.low..high = "
                f"{self.low:g}..{self.high:g}; state the range they have"
            )
        mapped = (rewards.double() - self.low) / (self.high - self.low)
        groups = list(_groups(mapped, group_ids))
        self._rates = [*self._rates, [group.mean().item() for _, group in groups]][-self.window :]
        alpha, beta = self.parameters()
        advantages = torch.zeros(len(rewards), dtype=torch.float64)
        for members, group in groups:
            if group.min() == group.max():
                continue
            rate = group.mean()
            density = torch.distributions.Beta(alpha, beta).log_prob(rate).exp()
            advantages[members] = (group - rate) * torch.clamp(1 / density, max=self.max_weight)
        return advantages

    def parameters(self) -> tuple[Tensor, Tensor]:
        """alpha and beta for the success rates seen: fixed ones, or 1 + a / 3 and 1 + b / 3 from their moments."""
        if self.alpha is not None and self.beta is not None:
            return _scalar(self.alpha), _scalar(self.beta)
        rates = torch.tensor([rate for step in self._rates for rate in step], dtype=torch.float64)
        if not len(rates):
            return _scalar(1.0), _scalar(1.0)
        mean, variance = rates.mean(), rates.var(correction=0)
        spread = mean * (1 - mean)
        if not 0 < variance < spread:  # all alike, or all 0 or 1: no beta distribution has these moments
            return _scalar(1.0), _scalar(1.0)
        strength = spread / variance - 1
        return 1 + mean * strength / 3, 1 + (1 - mean) * strength / 3

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self._rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates = state["rates"]


def normalize_then_sum(advantage: Advantage, rewards: Tensor, weights: Sequence[float], group_ids: Tensor) -> Tensor:
    """The weighted sum of each reward function's own advantage, normalised over the step (GDPO, arXiv:2601.05242).

    A = (s - mean(s)) / (std(s) + eps), where s is the weighted sum and mean and deviation are over the rollouts to which a
    function applies: so the advantages' size does not grow with the number of functions.

    Args:
        rewards: [N, F], NaN where a function does not apply.
        weights: one a function.

    Returns: [N] float64; 0 for a row of NaN.

    Raises: ValueError for an advantage that keeps a history: it would mix the functions'.
    """
    if isinstance(advantage, Stateful):
        raise ValueError(f"{type(advantage).__name__} keeps one history and cannot be applied to several rewards")
    columns = [w * advantage(column, group_ids) for w, column in zip(weights, rewards.double().T, strict=True)]
    summed = torch.stack(columns).sum(0)
    applies = ~torch.isnan(rewards).all(1)
    known = summed[applies]
    if not len(known) or known.min() == known.max():
        return torch.zeros_like(summed)
    return torch.where(applies, (summed - known.mean()) / (_std(known) + WHITENING_EPS), 0.0)


def _groups(rewards: Tensor, group_ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each group's members to which a reward applies: a mask [N] and their rewards, float64."""
    applies = ~torch.isnan(rewards)
    for group in sorted(set(cast(Any, group_ids).tolist())):
        members: Tensor = (group_ids == group) & applies
        if bool(members.any()):
            yield members, rewards[members].double()


def _varied_groups(rewards: Tensor, group_ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The groups whose rewards differ: rounding alone must not make an advantage."""
    return ((m, group) for m, group in _groups(rewards, group_ids) if group.min() != group.max())


def _std(values: Tensor) -> Tensor:
    return values.std() if len(values) > 1 else values.new_zeros(())


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _check_eps(eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, not {eps}")
