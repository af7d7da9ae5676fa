import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rlpost.config.schema import EvaluationConfig, StepConfig
from rlpost.data.stream import PromptStream
from rlpost.evaluate import Correctness, Evaluator, pass_at_k
from rlpost.rewards.combine import RewardSum
from rlpost.rewards.number import NumberReward
from rlpost.rollout.engine import Sampling
from rlpost.rollout.sampler import Sampler
from rlpost.types import Completion, Example, Prompt, Rollout
from tests.conftest import make_rollout


@pytest.mark.parametrize(
    ("n", "c", "k"), [(n, c, k) for n in range(1, 6) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n: int, c: int, k: int) -> None:
    subsets = list(itertools.combinations([i < c for i in range(n)], k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    with pytest.raises(ValueError, match=r"k must lie in 1\.\.4"):
        pass_at_k(4, 2, 5)


def test_correctness() -> None:
    correct = Correctness("number", 0.5)
    rollout = make_rollout()
    for value, expected in ((0.5, True), (0.4, False), (math.nan, False)):
        rollout.rewards = {"number": value}
        assert correct(rollout) is expected


def test_a_task_that_the_function_does_not_apply_to_has_its_own() -> None:
    correct = Correctness("number", 0.5, {"prose": "format"})
    rollout = make_rollout()
    rollout.rewards = {"number": math.nan, "format": 1.0}
    assert not correct(rollout)
    prose = replace(rollout.prompt, example=Example((), None, task="prose"))
    assert correct(Rollout(prose, rollout.completion, 0, rollout.rewards))


class ScriptedEngine:
    """Answers prompt i with the i-th script's lines, in order."""

    def __init__(self, scripts: dict[int, list[str]]) -> None:
        self.scripts = scripts
        self.seeds: list[int] = []

    def generate(self, prompts: list[Prompt], seeds: list[int], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        self.seeds = list(seeds)
        counters = {key: iter(lines) for key, lines in self.scripts.items()}
        texts = [next(counters[p.token_ids[0]]) for p in prompts]
        yield from enumerate(Completion((1,) * len(t), (0.0,) * len(t), t, "stop") for t in texts)


@pytest.mark.usefixtures("process_group")
def test_metrics_by_hand() -> None:
    """Two prompts of four samples: 2 of 4 and 0 of 4 correct."""
    engine = ScriptedEngine({0: ["7", "x", "7", "no"], 1: ["1", "2", "3", "40"]})
    prompts = [Prompt(Example((), a, task="sums"), (i,), "") for i, a in enumerate(["7", "9"])]
    reward = RewardSum({"number": NumberReward()}, {"number": 1.0})
    sampling = Sampling(max_tokens=8)
    sampler = Sampler(
        PromptStream([], seed=3), engine, reward, sampling, StepConfig(steps=1, seed=3), max_attempts=1, staleness=0
    )
    evaluator = Evaluator(
        prompts, sampler, Correctness("number"), sampling, EvaluationConfig(num_samples=4, pass_at=[1, 2])
    )
    assert evaluator(0) == pytest.approx(
        {
            "eval/sums/accuracy": 2 / 8,
            "eval/sums/length_mean": 10 / 8,
            "eval/sums/pass_at_1": (0.5 + 0) / 2,
            "eval/sums/pass_at_2": (5 / 6 + 0) / 2,
        }
    )
    first = engine.seeds
    evaluator(0)
    assert engine.seeds == first
    assert len(set(first)) == 8
