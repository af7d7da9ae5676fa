"""Arms over seeds: what is planned, what is run, what a crash and a resume leave."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import mlflow
import pytest

from rlpost.errors import UserError
from rlpost.sweep.arms import Job, Plan, any_failed, choices, clear_failures, job_arguments, named_arms, summary
from tests import slurm
from tests.runs import exact, rank_pids, rlpost, rows, start
from tests.sweep.helpers import make_job, make_plan

TOP = Path(__file__).parents[2]
ARMS = {"grpo": ["reducer=grpo"], "d64": ["reducer=drgrpo", "reducer.divisor=64"]}


def test_named_arms_come_seed_by_seed_and_their_overrides_win() -> None:
    jobs = named_arms(ARMS, [0, 1], ["steps=3", "sweep.fail_fast=true"])
    assert [(job.arm, job.seed) for job in jobs] == [("grpo", 0), ("d64", 0), ("grpo", 1), ("d64", 1)]
    assert jobs[1].overrides == ("steps=3", "reducer=drgrpo", "reducer.divisor=64", "seed=0")
    assert jobs[3].directory == "d64/seed-1"


@pytest.mark.parametrize(
    ("arms", "seeds", "arguments", "message"),
    [
        (ARMS, [], [], "at least one seed"),
        (ARMS, [0, 0], [], "a seed stands there twice"),
        ({"a/b": [], "grpo": []}, [0], [], "arms.a/b"),
        (ARMS, [0], ["seed=5"], "the seeds of this sweep are sweep.seeds="),
        (ARMS, [0], ["steps=1,2"], "this sweep has named arms"),
    ],
)
def test_named_arms_that_cannot_be(
    arms: dict[str, list[str]], seeds: list[int], arguments: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        named_arms(arms, seeds, arguments)


def test_choices_are_arms_but_for_the_seed() -> None:
    jobs = choices(["reducer=drgrpo", "reducer.divisor=16,64", "+x=range(2)", "seed=3,4"], None, "grpo", 0)
    assert len(jobs) == 8
    assert jobs[1] == Job("reducer.divisor=16, x=0", 4, ("reducer=drgrpo", "reducer.divisor=16", "+x=0", "seed=4"), "1")
    assert {job.arm for job in jobs} == {f"reducer.divisor={d}, x={x}" for d in (16, 64) for x in (0, 1)}
    assert [(job.arm, job.seed) for job in choices(["seed=1,2"], None, "grpo", 0)] == [("grpo", 1), ("grpo", 2)]
    assert [job.seed for job in choices(["steps=1,2", "seed=7"], None, "grpo", 0)] == [7, 7]
    assert [job.seed for job in choices(["steps=1,2"], None, "grpo", 5)] == [5, 5]
    with pytest.raises(UserError, match="hydra/sweeper=optuna"):
        choices(["optimizer.lr=interval(0,1)"], None, "grpo", 0)


def test_a_plan_is_kept_and_checked(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "sweep", ["grpo", "d64"], [1, 0], threshold=0.5, tracking={"uri": "u"})
    assert Plan.read(tmp_path / "sweep") == plan
    assert (plan.arms, plan.seeds) == (["grpo", "d64"], [0, 1])
    with pytest.raises(UserError, match="there is no sweep here"):
        Plan.read(tmp_path)
    with pytest.raises(UserError, match="there is no such arm; did you mean 'grpo'"):
        Plan("n", "grp", plan.jobs, "", "")
    with pytest.raises(UserError, match="arm grpo with seed 1 stands there 2 times"):
        Plan("n", "grpo", (*plan.jobs, plan.jobs[0]), "", "")


def test_a_jobs_arguments_say_where_it_is_shown_and_quote_its_name(tmp_path: Path) -> None:
    (job,) = choices(["optimizer.lr=1e-5", "seed=0"], None, "it's, x=1", 0)
    plan = Plan("n", job.arm, (job,), "", "", tracking={"experiment": "e"}, mlflow_run_id="r")
    assert job_arguments(tmp_path, job, plan, fail_fast=True) == [
        f"hydra.sweep.dir='{tmp_path}'",
        *("hydra.sweep.subdir=0", "sweep.fail_fast=true", "optimizer.lr=1e-5", "seed=0"),
        r"tracking.run_name='it\'s, x=1, seed 0'",
        *("++tracking.tags.sweep='n'", r"++tracking.tags.arm='it\'s, x=1'"),
        *("tracking.experiment='e'", "tracking.parent_run_id=r"),
    ]


def test_old_failures_do_not_stop_a_resumed_sweep(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, ["grpo", "d64"], [0])
    make_job(tmp_path, "grpo", 0, [0.1], state="failed", error="no")
    make_job(tmp_path, "d64", 0, [0.1])
    assert any_failed(tmp_path)
    clear_failures(tmp_path, plan.jobs)
    assert not any_failed(tmp_path)
    assert not any_failed(tmp_path / "grpo")  # no sweep


def test_a_job_that_came_to_no_directory_is_explained_by_its_launcher(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, ["grpo", "d64"], [0])
    make_job(tmp_path, "grpo", 0, [0.1], state="failed", error="its own reason")
    errors = {"grpo/seed-0": "RunFailedError: not shown", "d64/seed-0": "UserError: no module"}
    lines = summary(tmp_path, plan, errors)
    assert lines[:2] == [
        f"grpo, seed 0: failed: its own reason ({tmp_path}/grpo/seed-0/run.log)",
        "d64, seed 0: not started: UserError: no module",
    ]


SMOKE = ["--config-dir", str(TOP / "sweeps"), "--config-name", "smoke", "hydra/launcher=basic", "tracking=none"]
SMALL = [*SMOKE, "sweep.seeds=[0]", "steps=3", "evaluation.at_end=false", "checkpoint.every=1"]


@pytest.mark.slow
def test_a_wrong_arm_is_named_before_the_first_job_starts(tmp_path: Path) -> None:
    result = rlpost(tmp_path, *SMALL, "sweep.arms.grpo=['steps=0']", "hydra.sweep.dir=s", code=2)
    assert "arm grpo: steps=0: expected a whole number" in result.stderr
    result = rlpost(tmp_path, *SMALL, "sweep.arms.grpo=['reducer=grop']", "hydra.sweep.dir=s", code=2)
    assert "reducer=grop" in result.stderr
    assert not list(tmp_path.glob("s/*/seed-0"))


@pytest.mark.slow
def test_a_crash_and_a_divergence_are_reported_as_what_they_are_and_harm_nobody(tmp_path: Path) -> None:
    arms = [
        # rewards of 1 are outside
        "+sweep.arms.crash=['algorithm=bnpo', 'algorithm.advantage.high=0.5']",
        "+sweep.arms.diverge=['optimizer.lr=1e30', 'optimizer.max_grad_norm=null']",
        "~sweep.arms.token_mean",
    ]
    store = ["tracking=mlflow"]
    result = rlpost(tmp_path, *SMALL, *arms, *store, "hydra.sweep.dir=s", code=1)
    assert "crash, seed 0: failed: ValueError: rewards lie in" in result.stderr
    assert "s/crash/seed-0/run.log" in result.stderr
    assert "2 of 4 jobs finished" in result.stderr
    grpo, drgrpo = (rows(tmp_path / f"s/{arm}/seed-0") for arm in ("grpo", "drgrpo_64"))
    assert len(grpo) == len(drgrpo) == 3
    assert grpo[2]["policy/kl_ref"] > 0  # algorithm.kl.measure, without a term in the loss
    assert grpo[0]["reward/mean"] == drgrpo[0]["reward/mean"]
    assert grpo[0]["completions/length_mean"] == drgrpo[0]["completions/length_mean"]
    page = (tmp_path / "s/report/report.html").read_text()
    assert "crash, seed 0: failed: ValueError" in page
    assert "diverge, seed 0: diverged at step 1: " in page
    assert "alike in all arms (seeds 0)" in page

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/outputs/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("smoke").experiment_id])
    by_name = {run.info.run_name: run for run in runs}
    parent = by_name.pop("sweep smoke")
    assert {name: run.info.status for name, run in by_name.items()} == {
        **{"grpo, seed 0": "FINISHED", "drgrpo_64, seed 0": "FINISHED"},
        **{"crash, seed 0": "FAILED", "diverge, seed 0": "FAILED"},
    }
    assert parent.info.status == "FAILED"
    for name, run in by_name.items():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["arm"] == name.split(",")[0]
        assert (run.data.tags["sweep"], run.data.tags["seed"]) == ("smoke", "0")
    assert "grpo/reward_end" in parent.data.metrics
    assert "holds a sweep already" in rlpost(tmp_path, *SMALL, "hydra.sweep.dir=s", code=2).stderr


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was_and_its_table_is_the_same(tmp_path: Path) -> None:
    two_arms = [*SMALL, "~sweep.arms.token_mean"]
    rlpost(tmp_path, *two_arms, "hydra.sweep.dir=whole")
    process = start(tmp_path, *two_arms, "hydra.sweep.dir=killed")
    second = tmp_path / "killed/drgrpo_64/seed-0/metrics.jsonl"
    while not second.is_file():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    for pid in [process.pid, *rank_pids(second.parent)]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    done = tmp_path / "killed/grpo/seed-0/status.json"
    assert json.loads(done.read_text())["state"] == "finished"
    before = done.read_text()
    rlpost(tmp_path, "-m", "hydra.sweep.dir=killed", "resume=true")
    assert done.read_text() == before  # finished jobs are kept
    for arm in ("grpo", "drgrpo_64"):
        assert exact(tmp_path / f"killed/{arm}/seed-0") == exact(tmp_path / f"whole/{arm}/seed-0")
    for name in ("table.csv", "curves.csv"):
        assert (tmp_path / "killed/report" / name).read_text() == (tmp_path / "whole/report" / name).read_text()


def trivial(cwd: Path, *overrides: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A multirun of runs that train nothing; its jobs are real ones of the launcher."""
    arguments = ["-m", *overrides, "hydra.sweep.dir=s"]
    if "resume=true" not in overrides:
        arguments += ["plugins.allow=[trivial]", "cluster._target_=trivial.Trivial", "tracking=none", "steps=6"]
    return rlpost(cwd, *arguments, code=code, PYTHONPATH=str(TOP / "benchmarks"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_launchers_run_a_plain_multirun_and_a_failing_job_is_named(launcher: list[str], tmp_path: Path) -> None:
    result = trivial(tmp_path, *launcher, "+cluster.slope=0.1,0.2", "seed=0,1", "+cluster.fail_seed=1", code=1)
    assert f"cluster.slope=0.2, seed 1: failed: RuntimeError: fail_seed ({tmp_path}/s/3/run.log)" in result.stderr
    assert "2 of 4 jobs finished" in result.stderr
    assert json.loads((tmp_path / "s/2/result.json").read_text())["reward_last_5"] == pytest.approx(0.8)
    assert "cluster.slope=0.2" in (tmp_path / "s/report/report.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(slurm.why_not() is not None, reason=f"no Slurm: {slurm.why_not()}")
def test_a_multirun_on_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slurm").mkdir()
    with slurm.running(tmp_path / "slurm") as environment:
        monkeypatch.setenv("SLURM_CONF", environment["SLURM_CONF"])
        launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=5", "hydra.launcher.cpus_per_task=1"]
        jobs = ["reducer=grpo,drgrpo", "seed=0,1", "+cluster.fail_seed=1"]
        result = trivial(tmp_path, *launcher, "hydra.launcher.mem_gb=null", *jobs, code=1)
    assert "reducer=grpo, seed 1: failed: RuntimeError: fail_seed" in result.stderr
    assert "2 of 4 jobs finished" in result.stderr
    assert list((tmp_path / "s/.submitit").glob("*/*_submission.sh"))  # what sbatch was given


@pytest.mark.slow
def test_fail_fast_starts_no_further_job_and_a_resume_does(tmp_path: Path) -> None:
    failing = ["seed=0,1,2", "+cluster.fail_seed=1", "sweep.fail_fast=true"]
    result = trivial(tmp_path, *failing, code=1)
    assert "grpo, seed 1: failed: RuntimeError: fail_seed" in result.stderr
    assert "grpo, seed 2: not started" in result.stderr
    assert "1 of 3 jobs finished" in result.stderr
    refused = trivial(tmp_path, "resume=true", "steps=7", code=2)
    assert "steps=7: resume=true goes on with the sweep as it was planned" in refused.stderr
    go_on = re.search(r"to go on with the others: rlpost (.*)", result.stderr)
    assert go_on is not None
    assert go_on[1].split() == ["-m", "resume=true", f"hydra.sweep.dir={tmp_path}/s"]
    other = ["--config-dir", str(TOP / "sweeps"), "--config-name", "smoke"]
    changed = trivial(tmp_path, *other, "resume=true", code=2).stderr
    assert "arm grpo, seed 2: its configuration is not the one that was planned" in changed
    result = trivial(tmp_path, "resume=true", code=1)  # without fail_fast
    assert "2 of 3 jobs finished" in result.stderr


@pytest.mark.slow
def test_wrong_choices_are_answered_before_the_first_job(tmp_path: Path) -> None:
    assert (
        "arm prompts_per_step=0: prompts_per_step=0: expected a whole number"
        in trivial(tmp_path, "prompts_per_step=1,0", code=2).stderr
    )
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_optuna_searches_over_the_runs_objective(tmp_path: Path) -> None:
    search = [
        *("hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1"),
        *("hydra.sweeper.direction=maximize", "+cluster.slope=choice(0.1,0.2)", "hydra/sweeper/sampler=grid"),
    ]
    trivial(tmp_path, *search)
    best = (tmp_path / "s/optimization_results.yaml").read_text()
    assert "+cluster.slope: 0.2" in best
    assert "best_value: 0.8" in best
