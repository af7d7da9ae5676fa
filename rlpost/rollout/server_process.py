"""A vLLM server as a process of this machine, which ends with the process that started it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rlpost.cluster.node import end_with_parent

# The trainer's place among its ranks would make the server look for a process group of its own there.
_RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(LOCAL|GROUP|ROLE)_\w+|MASTER_\w+|TORCHELASTIC_\w+"
)

# Of a line in the log: the process, then the level, the time and the place.
_PREFIX = re.compile(r"^(\(.*? pid=\d+\) ?)?([A-Z]+ \d\S* \S+ \[\S+\] ?)?")

_GRACE_S = 10.0


class ServerProcess:
    """Not started yet; `start` again after its end gives it another port.

    Args:
        arguments: the server's arguments, less its address.
        log: the file to which its output is appended.
        threads: CPU threads; None: as many as this process.
        eager: have torch compile nothing. vLLM compiles a few functions of its sampler whatever its arguments say.
    """

    def __init__(self, arguments: Sequence[str], log: Path, threads: int | None, eager: bool = False) -> None:
        self.log, self.url = log, ""
        self._arguments, self._threads, self._eager = list(arguments), threads, eager
        self._process: subprocess.Popen[bytes] | None = None
        self._group: int | None = None  # of processes, until its end
        self._log_start = 0

    def start(self) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            # A session of its own: a Ctrl-C at the terminal is the trainer's, which still needs the server.
            self._process = subprocess.Popen(
                [*command, "--port", str(port), *self._arguments],
                env=_environment(os.environ, self._threads, self._eager),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(signal.SIGTERM),
            )
        self._group = self._process.pid

    def exited(self) -> str | None:
        """The process's exit code; None while it runs."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return None
        return f"its process ended ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"

    def reason(self) -> str:
        """The first error that it printed since it was started, or its last line: later errors follow from the first."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            printed = file.read().decode(errors="replace").splitlines()
        lines = [line for raw in printed if (line := _PREFIX.sub("", raw).strip())]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*: ", line)]
        return next(iter(errors), lines[-1] if lines else "it printed nothing")

    def stop(self) -> None:
        """Ask it and the processes that it started to end, without waiting."""
        if self._group is not None:
            _signal_group(self._group, signal.SIGTERM)

    def end(self) -> None:
        """End it and the processes that it started, which outlive it where it was killed; gracefully if that is quick."""
        self.stop()
        group, process, self._group = self._group, self._process, None
        if group is None or process is None:
            return
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            process.poll()  # takes note of its end
            if not _signal_group(group, 0):
                return
            time.sleep(0.05)
        _signal_group(group, signal.SIGKILL)
        process.wait()


def _signal_group(group: int, number: int) -> bool:
    """Returns: whether there still is a process in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _environment(variables: Mapping[str, str], threads: int | None, eager: bool) -> dict[str, str]:
    own = {k: v for k, v in variables.items() if not _RANK_VARIABLES.fullmatch(k) and k != "GLIBC_TUNABLES"}
    if threads is not None:
        own["OMP_NUM_THREADS"] = str(threads)
    if eager:
        own["TORCH_COMPILE_DISABLE"] = "1"
    own |= {"VLLM_SERVER_DEV_MODE": "1"}  # new weights need it
    # Of the server's interface its engine is a process of its own whatever this says; on a CPU "1" makes a third one of the
    # model's worker, whose imports and memory nothing is gained by: the threads are set here.
    own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if torch.cuda.is_available() else "0"}
    own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return own


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
