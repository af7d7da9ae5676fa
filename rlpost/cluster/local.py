"""Workers on this machine: one process, or several under torchrun."""

import ctypes
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Activations come and go by the gigabyte. By default glibc gives large blocks back at once and faults every 4 KiB of
# the next ones in again, a fifth of an update on CPUs; so: huge pages, and freed memory stays (docs/performance.md).
MALLOC = ":".join(
    f"glibc.malloc.{setting}" for setting in ("hugetlb=1", "mmap_max=0", f"trim_threshold={2**34}", f"top_pad={2**28}")
)


@dataclass(frozen=True)
class Local:
    """Start the run's workers here and wait for them.

    Attributes:
        num_processes: ranks; each holds a shard of the trainer and a rollout engine.
        threads: CPU threads of each rank; None shares the machine's cores out.
    """

    num_processes: int = 1
    threads: int | None = None

    def launch(self, run_dir: Path) -> int:
        """Run to the end. Returns: the workers' exit code. SIGINT and SIGTERM are passed on, once each."""
        threads = self.threads or max(1, available_cores() // self.num_processes)
        # The variables must be set before the libraries load; the run's results depend on the number of threads.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        environment.setdefault("PYTHONUNBUFFERED", "1")
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        environment.setdefault("GLIBC_TUNABLES", MALLOC)
        worker = ["-m", "rlpost.worker", str(run_dir)]
        if self.num_processes > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.num_processes}"]
            worker = [*torchrun, *worker]
        # A session of its own: a Ctrl-C at the terminal reaches the launcher alone, which passes it on once. Workers whose
        # launcher is killed end gracefully: they write a checkpoint.
        process = subprocess.Popen(
            [sys.executable, *worker],
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )
        previous = {
            s: signal.signal(s, lambda number, _: process.send_signal(number)) for s in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            code = process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return 128 - code if code < 0 else code


def available_cores() -> int:
    """Cores this process may use, which containers and schedulers limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(number: signal.Signals) -> None:
    """On Linux, have the kernel send this process the signal if the process that started it is killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
