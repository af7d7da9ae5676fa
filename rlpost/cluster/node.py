"""A node's cores and GPUs, and the environment that its workers start in."""

import ctypes
import os
import signal
import sys
from pathlib import Path

# Activations come and go by the gigabyte. By default glibc gives large blocks back at once and faults every 4 KiB of
# the next ones in again, a fifth of an update on CPUs; so: huge pages, and freed memory stays (docs/performance.md).
MALLOC = ":".join(
    f"glibc.malloc.{setting}" for setting in ("hugetlb=1", "mmap_max=0", f"trim_threshold={2**34}", f"top_pad={2**28}")
)
# Each library's name for its threads. A launcher that runs jobs side by side (joblib) sets some of them for its own processes.
_THREADS = [f"{name}_NUM_THREADS" for name in ("OMP", "MKL", "OPENBLAS", "BLIS", "NUMBA", "NUMEXPR")]
_THREADS.append("VECLIB_MAXIMUM_THREADS")
CORES = "RLPOST_CORES"  # on a machine shared with others: how many of its cores to use
_GPUS = Path("/proc/driver/nvidia/gpus")


def environment(num_processes: int, threads: int | None) -> dict[str, str]:
    """Variables that must be set before a worker's libraries load; its results depend on the number of threads.

    Args:
        num_processes: the processes of this node, which share its cores where `threads` is None.
        threads: CPU threads of each. None: its share of the cores.
    """
    count = str(threads or max(1, available_cores() // num_processes))
    variables = {**os.environ, **dict.fromkeys(_THREADS, count), "TOKENIZERS_PARALLELISM": "false"}
    variables.setdefault("PYTHONUNBUFFERED", "1")
    variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    variables.setdefault("GLIBC_TUNABLES", MALLOC)
    variables.setdefault("KMP_INIT_AT_FORK", "FALSE")  # scikit-learn sets it in each process that imports it
    variables.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # a forkserver has one thread
    return variables


def available_cores() -> int:
    """Cores this process may use, which containers, schedulers and the variable RLPOST_CORES limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, int(os.environ.get(CORES) or cores))


def num_gpus() -> int:
    """NVIDIA GPUs of this machine, asked without a library."""
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0


def end_with_parent(number: signal.Signals) -> None:
    """The kernel, on Linux, is to send this process the signal if the process that started it is killed."""
    _prctl(1, number)  # PR_SET_PDEATHSIG


def name_process(name: str) -> None:
    """The name under which top and ps show this process is set, on Linux; 15 characters of it count."""
    _prctl(15, name.encode()[:15])  # PR_SET_NAME


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
