"""The workers of one node: a process, or several under torchrun."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Activations come and go by the gigabyte. By default glibc gives large blocks back at once and faults every 4 KiB of
# the next ones in again, a fifth of an update on CPUs; so: huge pages, and freed memory stays (docs/performance.md).
MALLOC = ":".join(
    f"glibc.malloc.{setting}" for setting in ("hugetlb=1", "mmap_max=0", f"trim_threshold={2**34}", f"top_pad={2**28}")
)


def environment(num_processes: int, threads: int | None) -> dict[str, str]:
    """Variables that must be set before a worker's libraries load; its results depend on the number of threads.

    Args:
        num_processes: of this node, which share its cores where `threads` is None.
        threads: CPU threads of each.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads or max(1, available_cores() // num_processes))}
    variables["TOKENIZERS_PARALLELISM"] = "false"
    variables.setdefault("PYTHONUNBUFFERED", "1")
    variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    variables.setdefault("GLIBC_TUNABLES", MALLOC)
    return variables


def worker(run_dir: Path) -> list[str]:
    """The command of a worker, behind a Python interpreter."""
    return ["-m", "rlpost.worker", str(run_dir)]


def start(
    run_dir: Path, num_processes: int, threads: int | None, torchrun: Sequence[str] = ()
) -> "subprocess.Popen[bytes]":
    """Start this node's workers.

    Args: torchrun: options that make several nodes one group; without any, several processes are a group of their own.
    """
    command = worker(run_dir)
    if num_processes > 1 or torchrun:
        options = [*(torchrun or ["--standalone"]), f"--nproc-per-node={num_processes}"]
        command = ["-m", "rlpost.agent", *options, *command]
    # A session of its own: a Ctrl-C at the terminal reaches the launcher alone, which passes it on once. Workers whose
    # launcher is killed end gracefully: they write a checkpoint.
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment(num_processes, threads),
        start_new_session=True,
        preexec_fn=lambda: end_with_parent(signal.SIGTERM),
    )


def available_cores() -> int:
    """Cores this process may use, which containers and schedulers limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(number: signal.Signals) -> None:
    """On Linux, have the kernel send this process the signal if the process that started it is killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
