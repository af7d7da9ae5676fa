"""A run as a job of a real Slurm: it runs, is queued again and goes on, and is cancelled."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpost.cluster.slurm import Slurm, _exit_code
from rlpost.errors import UserError
from rlpost.record.status import RunStatus
from tests import slurm
from tests.runs import LIGHT, exact, rlpost, start, wait_for_steps

JOB = [*LIGHT, "cluster=slurm", "tracking=none", "steps=6", "checkpoint.every=2"]


def test_without_slurm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"cluster=slurm: .*srun"):
        Slurm().launch(tmp_path)


def test_the_exit_code_is_what_the_run_says_of_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunStatus(tmp_path)
    for state, details, code in (
        ("running", {}, 1),
        ("finished", {}, 0),
        ("interrupted", {}, 130),
        ("failed", {"error": "it broke"}, 1),
        ("failed", {"error": "it is wrong", "kind": "configuration"}, 2),
    ):
        run.set_state(state, **details)  # type: ignore[arg-type]
        assert _exit_code(run, "7", "TIMEOUT") == code
    said = capsys.readouterr().err
    assert said.splitlines() == ["rlpost: Slurm job 7 ended as TIMEOUT", "rlpost: it broke", "rlpost: it is wrong"]
    run.set_state("interrupted")  # by the notice, before the attempt that failed
    assert _exit_code(run, "7", "FAILED") == 1
    assert capsys.readouterr().err == "rlpost: Slurm job 7 ended as FAILED\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if (reason := slurm.why_not()) is not None:
        pytest.skip(f"no Slurm: {reason}")
    with pytest.MonkeyPatch.context() as patch, slurm.running(tmp_path_factory.mktemp("slurm")) as environment:
        patch.setenv("SLURM_CONF", environment["SLURM_CONF"])
        yield


def job_id(run: Path) -> str:
    (script,) = (run / "slurm").glob("*_submission.sh")
    (pickle,) = (run / "slurm").glob("*_submitted.pkl")
    assert script.is_file()
    return pickle.name.partition("_")[0]


def wait_for_state(job: str, wanted: str) -> None:
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
    deadline = time.monotonic() + 120
    while subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_a_job_runs_is_queued_again_and_goes_on(cluster: None, tmp_path: Path) -> None:
    rlpost(tmp_path, *JOB, "cluster=cpu", "cluster.threads=1", "run_dir=whole")
    process = start(tmp_path, *JOB, "run_dir=run")
    wait_for_steps(tmp_path / "run", 3, process)
    # What Slurm sends before the time limit, or before it pre-empts: a checkpoint, and the queue.
    job = job_id(tmp_path / "run")
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    wait_for_state(job, "PENDING")
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "interrupted"
    # Not two minutes later, but not within the second in which slurmd refuses what it has just killed either.
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+4"], check=True)
    _, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert exact(tmp_path / "run") == exact(tmp_path / "whole")
    log = next((tmp_path / "run/slurm").glob("*_log.out")).read_text()
    assert "this job is preempted" in log


@pytest.mark.slow
def test_interrupting_the_wait_cancels_the_job(cluster: None, tmp_path: Path) -> None:
    process = start(tmp_path, *JOB, "steps=500", "run_dir=run")
    wait_for_steps(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "interrupted"
    left = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True)
    assert left.stdout == ""
