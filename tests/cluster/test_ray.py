"""Runs on a real Ray cluster of two nodes on this machine."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import TINY, exact, rlpost, start, wait_for_steps

pytestmark = pytest.mark.slow
ON_RAY = ["cluster=ray", "cluster.num_processes=2", "cluster.strategy=STRICT_SPREAD", "rollout=transformers"]
RANKS = [*TINY, *ON_RAY, "tracking=none", "steps=4", "checkpoint.every=2"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray_cluster = pytest.importorskip("ray.cluster_utils")
    cluster = ray_cluster.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    cluster.shutdown()


def test_two_nodes_train_like_two_processes(cluster: Any, tmp_path: Path) -> None:
    rlpost(tmp_path, *RANKS, "run_dir=ray")
    rlpost(tmp_path, *RANKS[: len(TINY)], "cluster=cpu2", "cluster.threads=1", *RANKS[-3:], ON_RAY[-1], "run_dir=local")
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
