"""How many hostile strings each reward reads in a second, and the slowest: python -m benchmarks.rewards [COUNT]

Every string goes to each reward as a completion of its own; what takes longer than the reward's limit is a failure.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from rlpost.rewards.code import CodeReward
from rlpost.rewards.format import FormatReward
from rlpost.rewards.math import MathReward
from rlpost.rewards.number import NumberReward
from rlpost.rewards.reasoning_gym import ReasoningGymReward
from tests.rewards.hostile import hostile

GOLDS = ["18", "\\frac{\\pi}{2}", "[0, 1)", "x^2 + 1"]


def main(count: int = 10_000) -> None:
    from rlpost.data.tasks import ReasoningGym

    entry = ReasoningGym("chain_sum", size=2, held_out=1).load().train[0].columns
    rewards: dict[str, Callable[..., Any]] = {
        "number": NumberReward(),
        "math": MathReward(seconds=1),
        "format": FormatReward(r"<think>.*</think>.+", whole=True),
        "code": CodeReward(seconds=1.0),
        "reasoning_gym": ReasoningGymReward(),
    }
    strings = hostile(count)
    print(f"{'reward':<14}{'a second':>10}{'median ms':>11}{'slowest s':>11}")
    for name, reward in rewards.items():
        seconds = []
        for number, text in enumerate(strings):
            columns = {"tests": [["assert f()"]], **{key: [value] for key, value in entry.items()}}
            started = time.perf_counter()
            (value,) = reward(completions=[text], answers=[GOLDS[number % len(GOLDS)]], **columns)
            seconds.append(time.perf_counter() - started)
            if value not in (0.0, 1.0, None) and name != "reasoning_gym":
                raise AssertionError(f"{name} gave {value} for {text[:200]!r}")
        rate = len(seconds) / sum(seconds)
        print(f"{name:<14}{rate:>10.0f}{1000 * statistics.median(seconds):>11.2f}{max(seconds):>11.2f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
