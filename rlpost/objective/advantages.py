"""Advantages: how much better a completion did than its group."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


class Advantage(Protocol):
    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor: ...  # [N], [N] int64 -> [N]


@dataclass(frozen=True)
class GroupAdvantage:
    """Reward minus the group's mean, over the group's standard deviation (GRPO, arXiv:2402.03300, eq. 4.1.2).

    A = (r - mean) / (std + eps) with the sample standard deviation (n - 1), or A = r - mean with
    `normalize="none"` (Dr. GRPO, arXiv:2503.20783). Computed in float64.

    A reward of NaN (no reward function applies) is left out of its group's mean and deviation and has
    advantage 0. A group of one, and a group whose rewards are all equal, have advantage exactly 0.
    """

    normalize: Literal["group", "none"] = "group"
    eps: float = 1e-4

    def __post_init__(self) -> None:
        if self.normalize not in ("group", "none"):
            raise ValueError(f"normalize must be 'group' or 'none', not {self.normalize!r}")
        if self.eps < 0:
            raise ValueError(f"eps must not be negative, not {self.eps}")

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Args: rewards [N] float, group_ids [N] int64, in any order. Returns: [N] float64."""
        applies = ~torch.isnan(rewards)
        advantages = torch.zeros(len(rewards), dtype=torch.float64)
        for group in torch.unique(group_ids):
            members = (group_ids == group) & applies
            group_rewards = rewards[members].double()
            if len(group_rewards) < 2 or group_rewards.min() == group_rewards.max():
                continue
            centred = group_rewards - group_rewards.mean()
            advantages[members] = centred / (group_rewards.std() + self.eps) if self.normalize == "group" else centred
        return advantages
