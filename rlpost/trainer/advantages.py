"""The advantages of a step: the arguments of an advantage function, and where its values go."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlpost import distributed
from rlpost.objective.advantages import Advantage, normalize_then_sum
from rlpost.trainer.policy import Policy
from rlpost.types import Rollout


@dataclass(frozen=True)
class StepAdvantages:
    """Sets the advantage of every rollout of a step. It sees the whole step: each rank computes all and takes its own.

    Attributes:
        kl_in_reward: weight of the sequence's k1 estimate, taken off its reward; 0 is off.
        reward_weights: one a reward function, if the advantages of each are summed; None: those of the summed reward.
    """

    advantage: Advantage
    policy: Policy
    kl_in_reward: float = 0.0
    reward_weights: Sequence[float] | None = None

    def assign(self, rollouts: Sequence[Rollout]) -> None:
        """Set `advantage`, and with a KL in the reward `reward`, of this rank's rollouts to train on."""
        if self.kl_in_reward:
            for rollout, kl in zip(rollouts, self.policy.sequence_kl(rollouts), strict=True):
                rollout.reward -= self.kl_in_reward * kl
        mine = [(r.prompt.group_id, r.reward, list(r.rewards.values())) for r in rollouts]
        shares = distributed.gather_all(mine)
        everyones = [row for share in shares for row in share]
        group_ids = torch.tensor([group_id for group_id, _, _ in everyones])
        if self.reward_weights is not None:
            rewards = torch.tensor([each for _, _, each in everyones], dtype=torch.float64)
            advantages = normalize_then_sum(self.advantage, rewards, self.reward_weights, group_ids)
        else:
            total = torch.tensor([reward for _, reward, _ in everyones], dtype=torch.float64)
            advantages = self.advantage(total, group_ids)
        first = sum(len(share) for share in shares[: distributed.rank()])
        for rollout, value in zip(rollouts, advantages[first : first + len(mine)].tolist(), strict=True):
            rollout.advantage = value
