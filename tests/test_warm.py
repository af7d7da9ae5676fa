"""A run whose processes are forks of one that has the imports is, to the last bit, the run of new processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlpost.cluster.process import FAMILY
from tests.runs import LIGHT, TINY, assert_equal, exact, rlpost, weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only"),
]

SIZES = ["steps=2", "checkpoint.every=1", "evaluation.every=1", "tracking=none"]


def cold(cwd: Path, *overrides: str) -> None:
    """The command line in a new interpreter, whose workers are new ones too."""
    environment = {**os.environ, FAMILY: ""}
    command = [sys.executable, "-m", "rlpost", *overrides]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr


def assert_equal_runs(one: Path, other: Path) -> None:
    assert exact(one) == exact(other)
    for step in (1, 2):
        name = f"completions/step-{step:06d}.parquet"
        assert pq.read_table(one / name).equals(pq.read_table(other / name))
        assert_equal(weights(one, step), weights(other, step))


@pytest.mark.parametrize(
    "overrides", [[*TINY], [*LIGHT, "cluster=cpu2", "cluster.threads=1"]], ids=["a process", "two ranks"]
)
def test_forked_processes_give_the_run_of_new_ones_and_go_on_with_it(overrides: list[str], tmp_path: Path) -> None:
    rlpost(tmp_path, *overrides, *SIZES, "run_dir=warm")
    cold(tmp_path, *overrides, *SIZES, "run_dir=cold")
    assert_equal_runs(tmp_path / "warm", tmp_path / "cold")
    shutil.copytree(tmp_path / "cold", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-000002")
    (tmp_path / "resumed/status.json").unlink()
    rlpost(tmp_path, "run_dir=resumed", "resume=true")
    assert_equal_runs(tmp_path / "resumed", tmp_path / "cold")
