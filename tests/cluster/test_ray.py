"""Runs on a real Ray cluster of two nodes on this machine."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import LIGHT, exact, rlpost, start, wait_for_steps
from tests.sweep.test_arms import trivial

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.slow
TRAINING = [*LIGHT, "tracking=none", "steps=4", "checkpoint.every=2"]
RANKS = [*TRAINING, "cluster=ray", "cluster.num_processes=2", "cluster.strategy=STRICT_SPREAD"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray_cluster = pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(BENCHMARKS))  # what its workers may import
        cluster = ray_cluster.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


def test_two_nodes_train_like_two_processes(cluster: Any, tmp_path: Path) -> None:
    rlpost(tmp_path, *RANKS, "run_dir=ray")
    rlpost(tmp_path, *TRAINING, "cluster=cpu2", "cluster.threads=1", "run_dir=local")
    assert exact(tmp_path / "ray") == exact(tmp_path / "local")


def test_a_rank_that_dies_ends_the_run_with_its_name(cluster: Any, tmp_path: Path) -> None:
    process = start(tmp_path, *RANKS, "steps=200", "run_dir=run")
    wait_for_steps(tmp_path / "run", 2, process)
    os.kill(rank_of(tmp_path / "run", 1), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rlpost: rank 1 was ended by SIGKILL" in err
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["error"]) == ("failed", "rank 1 was ended by SIGKILL")


def test_a_sweep_is_spread_over_the_nodes(cluster: Any, tmp_path: Path) -> None:
    launcher = [
        "hydra/launcher=ray",
        "hydra.launcher.ray.init.address=auto",
        "+hydra.launcher.ray.init.object_store_memory=null",
    ]
    launcher += ["+hydra.launcher.ray.remote.num_cpus=1"]
    # A job is not over before another one has begun, for which its own node has no room.
    jobs = ["+cluster.slope=0.1,0.2", "seed=0,1", "+cluster.fail_seed=1", "+cluster.processes=2"]
    result = trivial(tmp_path, *launcher, *jobs, code=1)
    assert f"cluster.slope=0.2, seed 1: failed: RuntimeError: fail_seed ({tmp_path}/s/3/run.log)" in result.stderr
    assert "2 of 4 jobs finished" in result.stderr
    results = [json.loads((tmp_path / f"s/{job}/result.json").read_text()) for job in (0, 2)]
    assert results[1]["reward_last_5"] == pytest.approx(0.8)
    assert len({(tmp_path / f"s/{job}/started_by").read_text() for job in range(4)}) == 2


def test_no_room_is_said(cluster: Any, tmp_path: Path) -> None:
    result = rlpost(tmp_path, *RANKS, "cluster.num_processes=4", "cluster.placement_timeout_s=5", "run_dir=run", code=2)
    assert "cluster=ray: no room for 4 x {'CPU': 1} (STRICT_SPREAD) within 5 s" in result.stderr


def rank_of(run: Path, rank: int) -> int:
    """The process of a rank, wherever Ray started it."""
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"rlpost.worker" in command and str(run).encode() in command and f"RANK={rank}".encode() in variables:
            return int(entry.name)
    raise AssertionError(f"no rank {rank}")
