"""Held-out evaluation: accuracy and pass@k, greedy or sampled."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlpost import distributed
from rlpost.rewards.combine import RewardSum
from rlpost.rewards.function import TrainingState
from rlpost.rollout.engine import Engine, Sampling, sample_groups
from rlpost.types import Prompt, Rollout


@dataclass(frozen=True)
class Correctness:
    """Which completions count as correct: those whose reward by `function` is at least `threshold`."""

    function: str
    threshold: float = 1.0

    def __call__(self, rollout: Rollout) -> bool:
        return rollout.rewards[self.function] >= self.threshold  # False for NaN


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that one of k samples is correct: 1 - C(n - c, k) / C(n, k), unbiased (arXiv:2107.03374, eq. 1)."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must lie in 1..{num_samples}, not {k}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


class Evaluator:
    """Generates for the held-out prompts and reports `eval/<task>/...` for each of their tasks.

    The same prompts and seeds each time.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        engine: Engine,
        reward: RewardSum,
        correct: Correctness,
        sampling: Sampling,
        num_samples: int,
        pass_at: Sequence[int],
        seed: int,
    ) -> None:
        self._prompts = [replace(prompt, group_id=index) for index, prompt in enumerate(prompts)]
        self._engine = engine
        self._reward = reward
        self._correct = correct
        self._sampling = sampling
        self._num_samples = num_samples
        self._pass_at = list(pass_at)
        self._seed = seed

    def __call__(self, state: TrainingState) -> dict[str, float]:
        """Evaluate over all ranks.

        Returns: accuracy, pass_at_<k> and length_mean, the same on every rank.
        """
        rollouts = sample_groups(
            self._engine,
            distributed.share_of(self._prompts),
            self._num_samples,
            self._sampling,
            self._seed,
            step=0,  # training steps count from 1: held-out samples share no seed with them
            on_group=lambda group: self._reward.start(group, state),
        )
        self._reward.finish()
        groups = [rollouts[i : i + self._num_samples] for i in range(0, len(rollouts), self._num_samples)]
        sums: dict[str, float] = {}
        for name in sorted({prompt.example.task for prompt in self._prompts}):
            own = [group for group in groups if group[0].prompt.example.task == name]
            num_correct = [sum(map(self._correct, group)) for group in own]
            tokens = sum(len(r.completion.token_ids) for group in own for r in group)
            sums |= {
                f"eval/{name}/accuracy": sum(num_correct) / self._num_samples,
                f"eval/{name}/length_mean": tokens / self._num_samples,
                **{
                    f"eval/{name}/pass_at_{k}": sum(pass_at_k(self._num_samples, c, k) for c in num_correct)
                    for k in self._pass_at
                },
            }
        counts = Counter(prompt.example.task for prompt in self._prompts)
        return {
            name: value / counts[name.removeprefix("eval/").rpartition("/")[0]]
            for name, value in distributed.sum_over_ranks(sums).items()
        }
