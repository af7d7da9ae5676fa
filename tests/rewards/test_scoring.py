"""Reward functions as they really are: what they return, raise and do to their process, and what comes of it."""

import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rlpost.config.schema import ScoringConfig
from rlpost.errors import UserError
from rlpost.rewards.combine import RewardSum
from rlpost.rewards.function import RewardError, TrainingState
from rlpost.rewards.processes import ScoringProcesses
from rlpost.types import Rollout
from tests.conftest import make_rollout

STATE = TrainingState(step=3, num_steps=12)
MODULE = "rlpost.rewards.worker"

# What a user might write; the text of a completion says what it shall do.
FUNCTIONS = """
import asyncio, os, signal, sys, time

def scripted(*, completions, **_):
    values = []
    for text in completions:
        if text == "raise":
            raise KeyError("gone")
        if text == "hang":
            time.sleep(600)
        if text == "hang in C":
            10 ** 10 ** 9
        if text == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "exit":
            os._exit(3)
        values.append({"nan": float("nan"), "inf": float("inf"), "none": None, "text": "many"}.get(text, 1.0))
    return values

async def slow(*, completions, **_):
    await asyncio.sleep(0.01)
    return [float(len(text)) for text in completions]

def short(*, completions, **_):
    return [1.0]

def state(*, completions, step, progress, **_):
    return [step + progress] * len(completions)

def process_id(*, completions, **_):
    return [os.getpid()] * len(completions)

class Refuses:
    def __init__(self, size):
        raise ValueError(f"size={size}: expected less")
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The module's name, importable here and in every process that is started."""
    directory = tmp_path_factory.mktemp("functions")
    (directory / "scripted_rewards.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        yield "scripted_rewards"


@pytest.fixture
def scoring(functions: str) -> Iterator[Callable[..., RewardSum]]:
    """Makes RewardSums of named functions in processes of their own."""
    made: list[RewardSum] = []

    def make(*names: str, timeout: float = 60.0, on_error: Any = "fail", **settings: Any) -> RewardSum:
        nodes = {name: {"_target_": f"{functions}.{name}", "_partial_": True, **settings} for name in names}
        processes = ScoringProcesses(MODULE, names, nodes, 1, timeout)
        made.append(RewardSum({}, dict.fromkeys(names, 1.0), processes, ScoringConfig(on_error=on_error)))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def scored(reward: RewardSum, *texts: str, **columns: Any) -> list[Rollout]:
    rollouts = [make_rollout(text=text, sample_index=i, columns=columns) for i, text in enumerate(texts)]
    reward.start(rollouts, STATE)
    reward.finish()
    return rollouts


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([True, False], [1.0, 0.0]),
        (np.array([0.5, 2.0], dtype=np.float32), [0.5, 2.0]),
        (torch.tensor([0.25, 1.0]), [0.25, 1.0]),
        ([torch.tensor([3.0]), np.int64(4)], [3.0, 4.0]),
        ((Decimal("0.1"), 7), [0.1, 7.0]),
        ([None, 1], [math.nan, 1.0]),
        (iter([1, 2]), [1.0, 2.0]),
    ],
)
def test_numbers_of_every_kind(returned: Any, expected: list[float]) -> None:
    rollouts = scored(RewardSum({"f": lambda **_: returned}, {"f": 1.0}), "a", "b")
    np.testing.assert_equal([r.rewards["f"] for r in rollouts], expected)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "gave nan, expected a finite number, or None where it does not apply"),
        (-math.inf, "gave -inf, expected a finite number"),
        ("many", "gave 'many', expected a number or None"),
        (torch.tensor([1.0, 2.0]), r"gave tensor\(\[1\., 2\.\]\), expected a number or None"),
        ([1.0], r"gave \[1\.0\], expected a number or None"),
    ],
)
def test_what_is_no_number_names_function_and_row(value: Any, reason: str) -> None:
    def function(*, completions: list[str], **_: Any) -> list[Any]:
        return [value if text == "b" else 1.0 for text in completions]

    with pytest.raises(RewardError, match=rf"^reward\.f {reason}.*, for completion 'b' \(group 0, sample 1\)"):
        scored(RewardSum({"f": function}, {"f": 1.0}), "a", "b")


@pytest.mark.parametrize("returned", [None, 3.0])
def test_what_is_no_sequence(returned: Any) -> None:
    with pytest.raises(RewardError, match=r"reward\.f raised TypeError: .* not iterable"):
        scored(RewardSum({"f": lambda **_: returned}, {"f": 1.0}), "a")


@pytest.mark.parametrize("on_error", ["fail", "zero", "none"])
def test_a_wrong_number_of_values_ends_the_run_whatever_on_error_says(on_error: Any, scoring: Any) -> None:
    message = r"^reward\.short gave 1 values for 2 completions$"
    with pytest.raises(RewardError, match=message):
        scored(
            RewardSum({"short": lambda **_: [1.0]}, {"short": 1.0}, scoring=ScoringConfig(on_error=on_error)), "a", "b"
        )
    with pytest.raises(RewardError, match=message):
        scored(scoring("scripted", "short", on_error=on_error), "a", "b")


FAILURES = {
    "raise": "raised KeyError: 'gone'",
    "hang": r"took over 1 s and was stopped",
    "hang in C": r"took over 1 s and was stopped",
    "crash": r"ended its process \(SIGSEGV\)",
    "exit": r"ended its process \(exit code 3\)",
    "nan": "gave nan, expected a finite number",
    "inf": "gave inf, expected a finite number",
    "text": "gave 'many', expected a number or None",
}


@pytest.mark.parametrize(("text", "reason"), FAILURES.items())
def test_a_failure_in_a_process_names_function_and_row(text: str, reason: str, scoring: Any) -> None:
    with pytest.raises(
        RewardError, match=rf"^reward\.scripted {reason}.*, for completion '{text}' \(group 0, sample 2\)"
    ):
        scored(scoring("scripted", timeout=1.0), "a", "b", text)


@pytest.mark.parametrize(("on_error", "value"), [("zero", 0.0), ("none", math.nan)])
def test_a_failure_costs_no_other_row(
    on_error: str, value: float, scoring: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reward = scoring("scripted", timeout=1.0, on_error=on_error)
    texts = ["a", *FAILURES, "none", "b"]
    with caplog.at_level(logging.WARNING):
        rollouts = scored(reward, *texts)
    expected = [1.0] + [value] * len(FAILURES) + [math.nan, 1.0]
    np.testing.assert_equal([r.reward for r in rollouts], expected)
    assert {r.answer_text for r in rollouts if r.reward_errors} == set(FAILURES)
    assert rollouts[1].reward_errors == {"scripted": "raised KeyError: 'gone'"}
    assert caplog.text.count(f"it counts as {on_error} (said once)") == 1
    assert [r.reward for r in scored(reward, "a", "b")] == [1.0, 1.0]  # and the process works on


def test_a_row_to_which_nothing_applies_is_shown_once(scoring: Any, caplog: pytest.LogCaptureFixture) -> None:
    reward = scoring("scripted")
    with caplog.at_level(logging.WARNING):
        rollouts = scored(reward, "a", "none", "none")
    assert [math.isnan(r.reward) for r in rollouts] == [False, True, True]
    assert caplog.text.count("no reward function applies to completion 'none' (group 0, sample 1)") == 1


def test_coroutines_are_waited_for_here_and_there(scoring: Any) -> None:
    async def slow(*, completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    assert [r.reward for r in scored(RewardSum({"slow": slow}, {"slow": 1.0}), "a", "bb")] == [1.0, 2.0]
    assert [r.reward for r in scored(scoring("slow"), "a", "bb")] == [1.0, 2.0]


def test_the_training_state_is_passed_on(scoring: Any) -> None:
    assert [r.reward for r in scored(scoring("state"), "a")] == [3 + 3 / 12]


def test_several_processes_share_the_groups(functions: str) -> None:
    nodes = {"process_id": {"_target_": f"{functions}.process_id", "_partial_": True}}
    reward = RewardSum({}, {"process_id": 1.0}, ScoringProcesses(MODULE, ["process_id"], nodes, 2, 10.0))
    groups = [[make_rollout(group_id=g)] for g in range(40)]
    try:
        reward.wait_until_ready()
        for group in groups:
            reward.start(group, STATE)
        reward.finish()
        ids = {int(group[0].reward) for group in groups}
        assert len(ids) == 2
        assert all(psutil.pid_exists(process) for process in ids)
    finally:
        reward.close()
    assert not any(psutil.pid_exists(process) for process in ids)


def test_a_function_that_cannot_be_made_is_a_users_error(functions: str) -> None:
    nodes = {"no": {"_target_": f"{functions}.Refuses", "size": 3}}
    processes = ScoringProcesses(MODULE, ["no"], nodes, 1, 10.0)
    try:
        with pytest.raises(UserError, match=r"scripted_rewards\.Refuses: size=3: expected less"):
            processes.wait_until_ready()
    finally:
        processes.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux")
def test_no_process_outlives_the_run(functions: str, tmp_path: Path) -> None:
    """A run that is killed while a function hangs in C leaves nothing behind."""
    import subprocess

    script = f"""
import sys, time
from rlpost.rewards.processes import ScoringProcesses
pool = ScoringProcesses({MODULE!r}, ["f"], {{"f": {{"_target_": "{functions}.scripted", "_partial_": True}}}}, 1, 10.0)
pool.wait_until_ready()
pool.submit(["f"], {{"completions": ["hang in C"]}})
print(pool._all[0]._process.pid, flush=True)
time.sleep(600)
"""
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    scorer = psutil.Process(int(run.stdout.readline()))
    run.send_signal(signal.SIGKILL)
    run.wait()
    scorer.wait(timeout=60)
