"""What the jobs left, read back; what is measured of it, worked out by hand."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.sweep.measures import default_threshold, measures, summarize
from rlpost.sweep.results import config_differences, read_results
from tests.sweep.helpers import make_job, make_plan


def test_outcomes(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, ["grpo"], range(6))
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    make_job(tmp_path, "grpo", 0, [0.5])
    make_job(tmp_path, "grpo", 1, [0.5, 0.6], state="failed", kind="diverged", error="the gradient's norm is nan")
    make_job(tmp_path, "grpo", 2, [0.5], state="failed", error="RuntimeError: no")
    make_job(tmp_path, "grpo", 3, [0.5], state="running", pid=os.getpid())
    make_job(tmp_path, "grpo", 4, [0.5], state="running", pid=over.pid)  # killed: it could not say so
    results = read_results(tmp_path, plan)
    assert [r.outcome for r in results] == ["finished", "diverged", "failed", "running", "interrupted", "not started"]
    assert [r.step for r in results] == [1, 2, 1, 1, 1, 0]
    assert results[1].reason == "the gradient's norm is nan"


def test_curves_leave_out_what_is_not_known_and_find_the_task(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, ["grpo"], [0])
    lengths, accuracy = [None, 7.0, None], [0.1, None, None, 0.4]
    make_job(
        tmp_path,
        "grpo",
        0,
        [0.1, 0.2, 0.3],
        {"completions/length_correct": lengths, "eval/addition/accuracy": accuracy},
    )
    (result,) = read_results(tmp_path, plan)
    assert result.curve("reward/mean") == {1: 0.1, 2: 0.2, 3: 0.3}
    assert result.curve("completions/length_correct") == {2: 7.0}
    assert result.curve("eval/accuracy") == {0: 0.1, 3: 0.4}
    assert result.curve("policy/kl_ref") == {}


def test_config_differences_name_settings_and_leave_out_where_a_run_is_kept(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, ["grpo", "d64", "token_mean"], [0])
    make_job(tmp_path, "grpo", 0, [0.1])
    make_job(tmp_path, "d64", 0, [0.1])
    target = "rlpost.objective.reducers."
    assert config_differences(read_results(tmp_path, plan)) == {
        "reducer._target_": {"grpo": f"{target}SequenceMean", "d64": f"{target}ConstantDivisor"},
        "reducer.divisor": {"grpo": "-", "d64": 64},
    }


def test_measures_by_hand(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, ["grpo"], [0])
    incorrect = [10.0, 10.0, 10.0, 10.0, 10.0, None, None, 16.0, None, 20.0]
    rewards = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    metrics = {"completions/length_incorrect": incorrect, "eval/addition/accuracy": [0.2, *[None] * 9, 0.6]}
    make_job(tmp_path, "grpo", 0, rewards, metrics)
    (result,) = read_results(tmp_path, plan)
    found = {m.name: m.of(result) for m in measures(threshold=0.5)}
    assert found["reward_end"] == pytest.approx(0.7)  # of 0.5 .. 0.9
    assert found["accuracy_end"] == 0.6
    assert found["reward_area"] == pytest.approx(0.45)
    assert found["length_incorrect_end"] == 18.0  # of the two known among the last five steps
    assert found["length_incorrect_change"] == 8.0
    assert found["steps_to"] == 7  # the mean of 0.4, 0.5, 0.6 is the first to reach 0.5
    assert found["tokens_to"] == 700
    assert math.isnan(found["kl_end"])
    assert math.isnan(next(m for m in measures(0.85) if m.name == "steps_to").of(result))


def test_only_finished_jobs_are_summarized_and_pairs_are_by_seed(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, ["grpo", "d64"], [0, 1, 2])
    for seed, reward in enumerate((0.2, 0.4, 0.6)):
        make_job(tmp_path, "grpo", seed, [reward])
    make_job(tmp_path, "d64", 0, [0.3])
    make_job(tmp_path, "d64", 1, [0.9], state="failed", error="no")
    make_job(tmp_path, "d64", 2, [0.9])
    results = read_results(tmp_path, plan)
    reward = measures(0.5)[0]
    grpo, d64 = summarize(results, plan, reward)
    assert (grpo.estimate.mean, grpo.estimate.n, grpo.comparison) == (pytest.approx(0.4), 3, None)
    assert d64.values == {0: 0.3, 2: 0.9}
    assert d64.comparison is not None
    assert d64.comparison.differences == pytest.approx((0.1, 0.3))
    assert default_threshold(results) == pytest.approx(0.3)  # half of d64's 0.6
    steps = next(m for m in measures(0.5) if m.name == "steps_to")
    assert all(s.comparison is None for s in summarize(results, plan, steps))


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, ["grpo"], [0])
    make_job(tmp_path, "grpo", 0, [0.1, 0.2])
    with (tmp_path / "grpo/seed-0/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3})[:-2])
    assert read_results(tmp_path, plan)[0].step == 2
