"""The same sweep of four jobs that train, on a real Slurm, on a real Ray cluster of two nodes, and one after the other.

python -m benchmarks.launchers
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from tests import slurm
from tests.runs import LIGHT, exact

SWEEP = ["-m", *LIGHT, "reducer=grpo,drgrpo", "seed=0,1", "cluster.threads=1", "tracking=none", "hydra.sweep.dir=sweep"]
ON_SLURM = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=10", "hydra.launcher.cpus_per_task=1"]
ON_RAY = ["hydra/launcher=ray", "hydra.launcher.ray.init.address=auto", "+hydra.launcher.ray.remote.num_cpus=1"]


def sweep(directory: Path, *launcher: str, **environment: str) -> list[list[dict[str, Any]]]:
    """Every job's metrics, those that read a clock left out."""
    directory.mkdir()
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "rlpost", *SWEEP, *launcher]
    started = time.perf_counter()
    result = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr[-3000:])
    print(f"{directory.name:<8}{time.perf_counter() - started:.0f} s", flush=True)
    return [exact(directory / f"sweep/{job}") for job in range(4)]


def main() -> None:
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        expected = sweep(directory / "basic", "hydra/launcher=basic")
        (directory / "daemons").mkdir()
        with slurm.running(directory / "daemons") as environment:
            settings = [*ON_SLURM, "hydra.launcher.mem_gb=null"]
            on_slurm = sweep(directory / "slurm", *settings, SLURM_CONF=environment["SLURM_CONF"])
        os.environ["PYTHONPATH"] = str(ROOT)  # Ray's workers have what the cluster was started with
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        try:
            cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
            settings = [*ON_RAY, "+hydra.launcher.ray.init.object_store_memory=null"]
            on_ray = sweep(directory / "ray", *settings, RAY_ADDRESS=cluster.address)
        finally:
            cluster.shutdown()
    for name, found in (("slurm", on_slurm), ("ray", on_ray)):
        print(f"{name}: {sum(map(len, found))} steps, {'equal to the last bit' if found == expected else 'NOT equal'}")
    print(f"the arms differ: {expected[0] != expected[2]}")


if __name__ == "__main__":
    main()
