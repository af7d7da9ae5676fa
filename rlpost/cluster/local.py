"""Workers on this machine."""

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from rlpost.cluster import node
from rlpost.cluster.process import Process, prepare, start
from rlpost.cluster.ranks import INTERRUPTED, WRONG, cause, conclude, signals_passed_on, watch
from rlpost.config.ranges import AtLeast
from rlpost.errors import UserError
from rlpost.record.status import RunStatus


@dataclass(frozen=True)
class Local:
    """Start the run's workers here and wait for them.

    Attributes:
        num_processes: ranks; each holds a shard of the trainer and a rollout engine. "gpu": one for each GPU.
        threads: CPU threads of each rank; None shares the machine's cores out.
        max_restarts: how often all ranks are started again, from the newest checkpoint, after one has failed.
    """

    num_processes: Annotated[int, AtLeast(1)] | Literal["gpu"] = 1
    threads: Annotated[int, AtLeast(1)] | None = None
    max_restarts: Annotated[int, AtLeast(0)] = 0

    @property
    def num_ranks(self) -> int:
        """Ranks of a run, as far as this machine tells."""
        return max(1, node.num_gpus()) if self.num_processes == "gpu" else self.num_processes

    def prepare(self, config: Mapping[str, Any]) -> None:
        """Have what the workers of a run with this configuration import imported while other things are done."""
        if self.num_processes != "gpu":
            prepare(node.environment(self.num_processes, self.threads), _imports(config))

    def launch(self, run_dir: Path) -> int:
        """Run to the end. Returns: the workers' exit code. SIGINT and SIGTERM are passed on, once each."""
        count = self._num_processes()
        ranks: list[Process] = []
        codes: Mapping[int, int] = {}
        with signals_passed_on(lambda number: [rank.send_signal(number) for rank in ranks]) as signals:
            for restarts_left in range(self.max_restarts, -1, -1):
                ranks[:] = self._start(run_dir, count)
                codes = watch(ranks)
                failed = cause(codes)
                if failed is None or failed[1] in (WRONG, INTERRUPTED) or signals or not restarts_left:
                    break
                RunStatus(run_dir).set_state("starting")
                print(f"rlpost: a rank failed; starting again ({restarts_left} restarts left)", file=sys.stderr)
        if count > 1:
            return conclude(codes, RunStatus(run_dir))
        return 128 - codes[0] if codes[0] < 0 else codes[0]

    def _start(self, run_dir: Path, count: int) -> list[Process]:
        environment = node.environment(count, self.threads)
        imports = _imports(yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8")))
        if count == 1:
            return [start("rlpost.worker", [str(run_dir)], environment, imports=imports)]
        with socket.create_server(("127.0.0.1", 0)) as meeting:  # rank 0 gets it, so that nobody else takes the port
            group = {
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(meeting.getsockname()[1]),
            }
            return [
                start(
                    "rlpost.worker",
                    [str(run_dir)],
                    {**environment, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    imports=imports,
                    passed=[meeting.fileno()] if rank == 0 else [],
                )
                for rank in range(count)
            ]

    def _num_processes(self) -> int:
        if self.num_processes != "gpu":
            return self.num_processes
        if not (count := node.num_gpus()):
            raise UserError("cluster.num_processes=gpu: this machine has no NVIDIA GPU; use cluster=cpu or cpu2")
        return count


def _imports(config: Mapping[str, Any]) -> list[str]:
    """Modules that this run's worker will import, less the users' own, which are nobody else's to have."""
    modules = ["rlpost.worker"]
    if uri := config["tracking"]["uri"]:
        modules += ["mlflow", *(["mlflow.store.tracking.sqlalchemy_store"] if uri.startswith("sqlite:") else [])]

    def look_into(node: Any) -> None:
        if isinstance(node, Mapping):
            target = str(node.get("_target_", ""))
            if target.startswith("rlpost."):
                modules.append(target.rpartition(".")[0])
        for inner in node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ():
            look_into(inner)

    look_into(config)
    return list(dict.fromkeys(modules))
