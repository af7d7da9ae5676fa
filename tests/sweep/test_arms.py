"""Arms over seeds: what is planned, what is run, what a crash and a resume leave."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rlpost.errors import UserError
from rlpost.sweep.arms import Plan, expand
from tests.test_run import exact, rlpost, rows, start, worker_pids

SWEEPS = Path(__file__).parents[2] / "sweeps"
ARMS = {"grpo": ["reducer=grpo"], "d64": ["reducer=drgrpo", "reducer.divisor=64"]}


def test_jobs_come_seed_by_seed_and_an_arms_overrides_win() -> None:
    jobs = expand(ARMS, [0, 1], "grpo", ["steps=3"])
    assert [(job.arm, job.seed) for job in jobs] == [("grpo", 0), ("d64", 0), ("grpo", 1), ("d64", 1)]
    assert jobs[1].overrides == ("steps=3", "reducer=drgrpo", "reducer.divisor=64", "seed=0")
    assert jobs[3].directory == "d64/seed-1"


@pytest.mark.parametrize(
    ("arms", "seeds", "baseline", "message"),
    [
        ({}, [0], "grpo", "at least one arm"),
        (ARMS, [], "grpo", "at least one arm and one seed"),
        (ARMS, [0, 0], "grpo", "a seed stands there twice"),
        ({"a/b": [], "grpo": []}, [0], "grpo", "arms.a/b"),
        (ARMS, [0], "grp", "there is no such arm; did you mean 'grpo'"),
    ],
)
def test_plans_that_cannot_be(arms: dict[str, list[str]], seeds: list[int], baseline: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        expand(arms, seeds, baseline)


def test_a_plan_is_kept(tmp_path: Path) -> None:
    plan = Plan("n", "grpo", tuple(expand(ARMS, [0], "grpo")))
    plan.write(tmp_path / "sweep")
    assert Plan.read(tmp_path / "sweep") == plan
    with pytest.raises(UserError, match="there is no sweep here"):
        Plan.read(tmp_path)


SMOKE = ["--config-dir", str(SWEEPS), "--config-name", "smoke", "tracking=none"]
SMALL = [*SMOKE, "hydra.sweeper.seeds=[0]", "steps=3", "evaluation.at_end=false", "checkpoint.every=1"]


@pytest.mark.slow
def test_a_wrong_arm_is_named_before_the_first_job_starts(tmp_path: Path) -> None:
    result = rlpost(tmp_path, *SMALL, "hydra.sweeper.arms.grpo=['steps=0']", "hydra.sweep.dir=s", code=2)
    assert "arm grpo: steps=0: expected a whole number" in result.stderr
    result = rlpost(tmp_path, *SMALL, "hydra.sweeper.arms.grpo=['reducer=grop']", "hydra.sweep.dir=s", code=2)
    assert "reducer=grop" in result.stderr
    assert not list(tmp_path.glob("s/*/seed-0"))


@pytest.mark.slow
def test_a_crashing_arm_does_not_harm_the_others_and_first_steps_are_paired(tmp_path: Path) -> None:
    crash = (
        "hydra.sweeper.arms.token_mean=['algorithm=bnpo', 'algorithm.advantage.high=0.5']"  # rewards of 1 are outside
    )
    result = rlpost(tmp_path, *SMALL, crash, "hydra.sweep.dir=s", code=1)
    assert "token_mean, seed 0: failed: ValueError: rewards lie in" in result.stderr
    assert "s/token_mean/seed-0/run.log" in result.stderr
    assert "2 of 3 jobs finished" in result.stderr
    grpo, drgrpo = (rows(tmp_path / f"s/{arm}/seed-0") for arm in ("grpo", "drgrpo_64"))
    assert len(grpo) == len(drgrpo) == 3
    assert grpo[0]["reward/mean"] == drgrpo[0]["reward/mean"]
    assert grpo[0]["completions/length_mean"] == drgrpo[0]["completions/length_mean"]
    assert "holds a sweep already" in rlpost(tmp_path, *SMALL, "hydra.sweep.dir=s", code=2).stderr


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    two_arms = [*SMALL, "~hydra.sweeper.arms.token_mean"]
    rlpost(tmp_path, *two_arms, "hydra.sweep.dir=whole")
    process = start(tmp_path, *two_arms, "hydra.sweep.dir=killed")
    second = tmp_path / "killed/drgrpo_64/seed-0/metrics.jsonl"
    while not second.is_file():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    for pid in [process.pid, *worker_pids(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    done = tmp_path / "killed/grpo/seed-0/status.json"
    assert json.loads(done.read_text())["state"] == "finished"
    before = done.read_text()
    rlpost(tmp_path, *two_arms, "hydra.sweep.dir=killed", "resume=true")
    assert done.read_text() == before  # finished jobs are kept
    for arm in ("grpo", "drgrpo_64"):
        assert exact(tmp_path / f"killed/{arm}/seed-0") == exact(tmp_path / f"whole/{arm}/seed-0")
