"""Ranks on this machine: one that fails ends the run and says so, and the run goes on from its checkpoint."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlpost.cluster.local import Local
from rlpost.errors import UserError
from tests.runs import LIGHT, exact, rank_pids, rlpost, start, wait_for_steps

RANKS = [*LIGHT, "cluster=cpu2", "tracking=none", "steps=8", "checkpoint.every=2", "prompts_per_step=6"]


def test_a_gpu_a_process_needs_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.cluster.node._GPUS", tmp_path / "none")
    with pytest.raises(UserError, match="this machine has no NVIDIA GPU"):
        Local(num_processes="gpu").launch(tmp_path)
    (tmp_path / "gpus").mkdir()
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir()
    monkeypatch.setattr("rlpost.cluster.node._GPUS", tmp_path / "gpus")
    assert Local(num_processes="gpu")._num_processes() == 2


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def uninterrupted(work: Path) -> Path:
    rlpost(work, *RANKS, "run_dir=whole")
    return work / "whole"


@pytest.mark.slow
def test_stopped_ranks_write_a_checkpoint_and_a_killed_one_ends_the_run_with_its_name(
    uninterrupted: Path, work: Path
) -> None:
    """One run that loses its ranks twice, and ends with the numbers of the one that was left alone."""
    process = start(work, *RANKS, "run_dir=run")
    wait_for_steps(work / "run", 2, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    status = json.loads((work / "run/status.json").read_text())
    assert status["state"] == "interrupted"
    assert (work / f"run/checkpoints/step-{status['step']:06d}").is_dir()

    process = start(work, "run_dir=run", "resume=true")
    wait_for_steps(work / "run", status["step"] + 1, process)
    os.kill(rank_pids(work / "run")[1], signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30  # what the run promises, not a benchmark
    assert process.returncode == 1
    assert "rlpost: rank 1 was ended by SIGKILL" in err
    assert "Traceback" not in err
    status = json.loads((work / "run/status.json").read_text())
    assert (status["state"], status["error"]) == ("failed", "rank 1 was ended by SIGKILL")
    rlpost(work, "run_dir=run", "resume=true")
    assert exact(work / "run") == exact(uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_two_ranks_checkpoint_goes_on_with_other_ranks(uninterrupted: Path, work: Path, ranks: int) -> None:
    run = work / f"on {ranks}"
    shutil.copytree(uninterrupted, run)
    shutil.rmtree(run / "checkpoints/step-000008")
    (run / "status.json").unlink()
    rlpost(work, f"run_dir='{run}'", "resume=true", f"cluster.num_processes={ranks}")
    for row, expected in zip(exact(run), exact(uninterrupted), strict=True):
        known = {name: value for name, value in expected.items() if value is not None}
        assert {name: row[name] for name in known} == pytest.approx(known, rel=1e-6, abs=1e-6)


@pytest.mark.slow
def test_ranks_are_started_again_where_that_is_asked_for(uninterrupted: Path, work: Path) -> None:
    process = start(work, *RANKS, "cluster.max_restarts=1", "run_dir=again")
    wait_for_steps(work / "again", 3, process)
    os.kill(rank_pids(work / "again")[0], signal.SIGKILL)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert exact(work / "again") == exact(uninterrupted)


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [("sys.exit(2)", 2, ""), ("sys.exit(3)", 1, "rlpost: rank 1 was ended with exit code 3\n"), ("pass", 0, "")],
)
def test_the_exit_code_of_ranks(ending: str, code: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(f"import os, sys\nif os.environ['RANK'] == '1':\n    {ending}\n")
    command = [sys.executable, "-m", "rlpost.cluster.torchrun", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert (result.returncode, result.stderr) == (code, said)
