"""Runs that are killed, stopped, resumed and spread over ranks are the run that was left alone."""

import json
import os
import signal
from pathlib import Path

import mlflow
import pytest

from tests.runs import (
    KILLED,
    TINY,
    assert_equal,
    exact,
    kill_in_a_step,
    rank_pids,
    rlpost,
    rows,
    start,
    wait_for_steps,
    weights,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def uninterrupted(work: Path) -> Path:
    rlpost(work, *KILLED, "tracking=none", "run_dir=runs/whole")
    return work / "runs/whole"


def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(uninterrupted: Path, work: Path) -> None:
    kill_in_a_step(work, "runs/killed", 3, *KILLED)
    killed = work / "runs/killed"
    assert json.loads((killed / "status.json").read_text())["state"] == "running"
    assert len(rows(killed)) < 7
    rlpost(work, f"run_dir={killed}", "resume=true")
    assert exact(killed) == exact(uninterrupted)
    assert_equal(weights(killed, 7), weights(uninterrupted, 7))
    result = json.loads((killed / "result.json").read_text())
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{work}/outputs/mlflow.db")
    steps = [m.step for m in client.get_metric_history(result["mlflow_run_id"], "reward/mean")]
    assert sorted(steps) == list(range(1, 8))  # the same run, each step once
    kept = sorted(p.name for p in (killed / "checkpoints").iterdir())
    assert kept == ["step-000006", "step-000007"]


def test_killed_workers_are_failed(work: Path) -> None:
    run = work / "runs/worker-killed"
    process = start(work, *KILLED, f"run_dir={run}")
    wait_for_steps(run, 1, process)
    for pid in rank_pids(run):
        os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 137, err
    assert "ended with exit code 137" in err
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["error"]) == ("failed", "the workers ended with exit code 137")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{work}/outputs/mlflow.db")
    assert client.get_run(status["mlflow_run_id"]).info.status == "FAILED"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_checkpoints_and_exits_130(number: signal.Signals, uninterrupted: Path, work: Path) -> None:
    run = work / f"runs/{number.name}"
    process = start(work, *KILLED, f"run_dir={run}")
    wait_for_steps(run, 1, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "interrupted"
    done = len(rows(run))
    assert (run / "checkpoints" / f"step-{done:06d}").is_dir()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{work}/outputs/mlflow.db")
    assert client.get_run(status["mlflow_run_id"]).info.status == "KILLED"
    if number == signal.SIGTERM:
        rlpost(work, f"run_dir={run}", "resume=true")
        assert exact(run) == exact(uninterrupted)
        assert client.get_run(status["mlflow_run_id"]).info.status == "FINISHED"


def test_two_ranks_with_an_engine_each_train_like_one(work: Path) -> None:
    sizes = ["steps=3", "prompts_per_step=8", "rollout.max_tokens=60", "evaluation.every=2", "checkpoint.every=0"]
    common = [*TINY, *sizes, "checkpoint.at_end=false", "rollout.engine.kv_cache_bytes=67108864", "tracking=none"]
    rlpost(work, *common, "run_dir=runs/one")
    rlpost(work, *common, "cluster=cpu2", "cluster.threads=1", "run_dir=runs/two")
    for two, one in zip(exact(work / "runs/two"), exact(work / "runs/one"), strict=True):
        assert {k for k, v in two.items() if v is None} == {k for k, v in one.items() if v is None}
        known = [{k: v for k, v in row.items() if v is not None} for row in (two, one)]
        assert known[0] == pytest.approx(known[1], rel=1e-3, abs=1e-4)
