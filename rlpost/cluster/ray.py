"""Workers that a Ray cluster places: an actor for each rank, which holds its resources and runs the worker as a process.

The run directory must be on a file system that all nodes share.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from rlpost.cluster import node
from rlpost.cluster.ranks import conclude, signals_passed_on, watch
from rlpost.config.ranges import Above, AtLeast
from rlpost.errors import UserError, require
from rlpost.record.status import RunStatus

POLL_S = 0.5


@dataclass(frozen=True)
class Ray:
    """Place the run's workers, start them and wait for them.

    Attributes:
        num_processes: ranks.
        cpus_per_process, gpus_per_process: resources of each; its cores are its threads.
        address: the address of a running cluster, as ray.init takes it ("auto": this machine's); None: one of this machine
            alone.
        strategy: where the ranks go: PACK on few nodes, SPREAD over many, or the STRICT_ form of either.
        placement_timeout_s: how long the resources may take to become free.
    """

    requires_packages: ClassVar[Mapping[str, str]] = {"ray": "ray"}

    num_processes: Annotated[int, AtLeast(1)] = 1
    cpus_per_process: Annotated[int, AtLeast(1)] = 1
    gpus_per_process: Annotated[int, AtLeast(0)] = 0
    address: str | None = "auto"
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    placement_timeout_s: Annotated[float, Above(0)] = 600.0

    @property
    def num_ranks(self) -> int:
        return self.num_processes

    def launch(self, run_dir: Path) -> int:
        """Run to the end. Returns: the run's exit code. SIGINT and SIGTERM are passed on to the workers.

        Raises: UserError where there is no cluster, or the resources are not to be had.
        """
        require(self.requires_packages, "cluster=ray")
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        try:
            ray.init(address=self.address, log_to_driver=True, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise UserError(f"cluster.address={self.address}: {str(error).splitlines()[0]}") from error
        try:
            bundle = {"CPU": self.cpus_per_process, **({"GPU": self.gpus_per_process} if self.gpus_per_process else {})}
            group = ray.util.placement_group([dict[str, float](bundle)] * self.num_processes, strategy=self.strategy)
            if not group.wait(self.placement_timeout_s):
                raise UserError(
                    f"cluster=ray: no room for {self.num_processes} x {bundle} ({self.strategy}) within "
                    f"{self.placement_timeout_s:g} s; the cluster has {ray.cluster_resources()}"
                )
            actor = ray.remote(num_cpus=self.cpus_per_process, num_gpus=self.gpus_per_process)(Rank)
            ranks = [
                actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
                for index in range(self.num_processes)
            ]
            places = ray.get([rank.place.remote() for rank in ranks])  # pyright: ignore[reportFunctionMemberAccess] - ray adds it
            address, port = places[0]
            seen: Counter[str] = Counter()
            for number, (rank, (host, _)) in enumerate(zip(ranks, places, strict=True)):
                variables = {
                    "RANK": str(number),
                    "WORLD_SIZE": str(self.num_processes),
                    "LOCAL_RANK": str(seen[host]),
                    "MASTER_ADDR": address,
                    "MASTER_PORT": str(port),
                }
                seen[host] += 1
                ray.get(rank.start.remote(str(run_dir), self.cpus_per_process, variables))  # pyright: ignore[reportFunctionMemberAccess] - ray adds it
            started = [_Remote(rank) for rank in ranks]
            with signals_passed_on(lambda number: [rank.send_signal(number) for rank in started]):
                codes = watch(started, poll_s=POLL_S)
            return conclude(codes, RunStatus(run_dir))
        finally:
            ray.shutdown()


class _Remote:
    """A rank's process, by its actor."""

    def __init__(self, actor: Any) -> None:
        import ray

        self._actor, self._get = actor, ray.get

    def poll(self) -> int | None:
        return self._get(self._actor.code.remote())

    def send_signal(self, sig: int) -> None:
        self._actor.signal.remote(sig)


class Rank:
    """An actor: one rank's process, beside which it answers."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, int]:
        """This node's address, and a port that is free on it."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def start(self, run_dir: str, threads: int, variables: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlpost.worker", run_dir],
            env={**node.environment(1, threads), **variables},
            start_new_session=True,
            preexec_fn=lambda: node.end_with_parent(signal.SIGTERM),
        )

    def code(self) -> int | None:
        """The process's exit code; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def signal(self, number: int) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            os.kill(self._process.pid, number)
