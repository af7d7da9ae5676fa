"""Held-out evaluation: accuracy and pass@k, greedy or sampled."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlpost import distributed
from rlpost.config.schema import EvaluationConfig
from rlpost.rollout.engine import Sampling
from rlpost.rollout.sampler import Sampler
from rlpost.types import Prompt, Rollout


@dataclass(frozen=True)
class Correctness:
    """Decides which completions count as correct: those whose reward by a function is at least `threshold`.

    Attributes:
        function: the reward function that decides.
        by_task: another one, for tasks that it does not apply to.
    """

    function: str
    threshold: float = 1.0
    by_task: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, rollout: Rollout) -> bool:
        function = self.by_task.get(rollout.prompt.example.task, self.function)
        return rollout.rewards[function] >= self.threshold  # False for NaN


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
        sampler: Sampler,
        correct: Correctness,
        sampling: Sampling,
        evaluation: EvaluationConfig,
    ) -> None:
        """Args: sampling: the run's; the evaluation's temperature takes the place of its own."""
        self._prompts = [replace(prompt, group_id=index) for index, prompt in enumerate(prompts)]
        self._sampler = sampler
        self._correct = correct
        self._sampling = sampling.for_evaluation(evaluation.temperature)
        self._num_samples = evaluation.num_samples
        self._pass_at = list(evaluation.pass_at)

    def __call__(self, step: int) -> dict[str, float]:
        """Evaluate the weights after a step, over all ranks.

        Returns: accuracy, pass_at_<k> and length_mean, the same on every rank.
        """
        mine = distributed.share_of(self._prompts)
        rollouts = self._sampler.sample_held_out(mine, self._num_samples, self._sampling, step)
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
