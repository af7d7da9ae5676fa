"""Workers on this machine."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlpost.cluster import node
from rlpost.errors import UserError

_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Local:
    """Start the run's workers here and wait for them.

    Attributes:
        num_processes: ranks; each holds a shard of the trainer and a rollout engine. "gpu": one for each GPU.
        threads: CPU threads of each rank; None shares the machine's cores out.
        max_restarts: how often all ranks are started again, from the newest checkpoint, after one has failed.
    """

    num_processes: int | Literal["gpu"] = 1
    threads: int | None = None
    max_restarts: int = 0

    def launch(self, run_dir: Path) -> int:
        """Run to the end. Returns: the workers' exit code. SIGINT and SIGTERM are passed on, once each."""
        restarts = ["--standalone", f"--max-restarts={self.max_restarts}"] if self.max_restarts else []
        process = node.start(run_dir, self._num_processes(), self.threads, restarts)
        previous = {
            s: signal.signal(s, lambda number, _: process.send_signal(number)) for s in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            code = process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return 128 - code if code < 0 else code

    def _num_processes(self) -> int:
        if self.num_processes != "gpu":
            return self.num_processes
        if not (count := num_gpus()):
            raise UserError("cluster.num_processes=gpu: this machine has no NVIDIA GPU; use cluster=cpu or cpu2")
        return count


def num_gpus() -> int:
    """NVIDIA GPUs of this machine, asked without a library."""
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
