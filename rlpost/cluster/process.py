"""The start of the platform's own Python processes: forked from one that has the imports already, or new.

Processes that start others belong to a family, which the command line makes:

    with family():
        start("rlpost.worker", ["outputs/grpo/1"], environment, imports=["rlpost.rollout.vllm"])

The first `start` with an environment makes a forkserver for it, and every later one forks from that: a tenth of a second in
place of 7 to 12 of imports. Processes find their family by the environment variable RLPOST_FORKSERVERS. Without one, on
machines with GPUs and outside Linux, every process is a new one.
"""

import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from rlpost.cluster.forkserver import CHANGED, SERVER, Request
from rlpost.cluster.node import end_with_parent, num_gpus

FAMILY = "RLPOST_FORKSERVERS"  # the family's directory; an empty value turns forking off
# Variables that no library reads while it is imported: processes that differ in nothing else can be forks of one server.
_PER_PROCESS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_PER_PROCESS |= {
    "ENABLE_IPC",  # joblib's
    "VLLM_DIST_IDENT",  # names that MLflow and vLLM give each process
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
    "_MLFLOW_TELEMETRY_SESSION_ID",
    "PYTHONPATH",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "PYTEST_CURRENT_TEST",
    "HYDRA_FULL_ERROR",
    "RAY_ADDRESS",
    "SLURM_CONF",
    FAMILY,
}
_MOST_SERVERS = 128
_started: list["subprocess.Popen[bytes]"] = []  # servers, by this process


class Watched(Protocol):
    """A process here or elsewhere that can be asked for its exit code, and sent signals."""

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int) -> None: ...


class Process(Watched, Protocol):
    """A process of this machine, with the methods of subprocess.Popen that are used."""

    pid: int

    def wait(self, timeout: float | None = None) -> int: ...


def start(
    module: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    directory: Path | None = None,
    death_signal: signal.Signals = signal.SIGTERM,
    imports: Sequence[str] = (),
    streams: tuple[int, int, int] = (0, 1, 2),
    passed: Sequence[int] = (),
) -> Process:
    """Run `python -m module arguments`, in a session of its own. Keep what is returned: a fork ends with it.

    Args:
        environment: all variables of the process. None: those of this process, and if this one is a fork, so is the new one.
        directory: the process's working directory; None: this process's.
        death_signal: sent to the process if this one ends before it, or lets go of what was returned.
        imports: modules that it will import anyway; a forkserver has them ready.
        streams: descriptors that become its standard input, output and error.
        passed: further descriptors; the numbers that the process knows them by are appended to its arguments.
    """
    if environment is not None:
        environment = _before_imports(environment)
    with suppress(OSError):  # the family is over, or its server could not import what it should: a new process says why
        if server := os.environ.get(SERVER) if environment is None else _server(environment, imports):
            variables = dict(os.environ if environment is None else environment)
            request = Request(
                module,
                list(arguments),
                str(directory or Path.cwd()),
                variables,
                sorted(os.sched_getaffinity(0)),
                death_signal,
                [*streams, *passed],
            )
            return _Fork(server, request)
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments, *map(str, passed)],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=directory,
        env=environment,
        pass_fds=passed,
        start_new_session=True,
        preexec_fn=lambda: end_with_parent(death_signal),
    )


def prepare(environment: Mapping[str, str], imports: Sequence[str]) -> None:
    """Have a server ready for processes that will be started so, without waiting for it; nothing without a family."""
    with suppress(OSError):
        _server(_before_imports(environment), imports)


def _before_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what this process has as a fork: the imports of another process may set something else."""
    variables = {name: value for name, value in environment.items() if name not in (SERVER, CHANGED)}
    for name, (before, after) in json.loads(os.environ.get(CHANGED, "{}")).items():
        if variables.get(name) == after:
            del variables[name]
            if before is not None:
                variables[name] = before
    return variables


@contextmanager
def family() -> Iterator[None]:
    """Let processes that are started within it, by this process or those it starts, be forks.

    Inside another family that still exists it is a part of that one. Servers end when the process that made the family does.
    """
    known = os.environ.get(FAMILY)
    if known == "" or (known is not None and _exists(Path(known))) or sys.platform != "linux" or num_gpus():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="rlpost-", ignore_cleanup_errors=True) as directory, _socket() as owner:
        try:
            owner.bind(f"{directory}/owner")
        except OSError:  # the path is longer than a socket's may be
            yield
            return
        owner.listen(_MOST_SERVERS)  # servers connect and are never answered: the end of the socket tells them
        os.environ[FAMILY] = directory
        try:
            yield
        finally:
            del os.environ[FAMILY]
            while _started:
                _started.pop().terminate()  # one that still imports; afterwards it does not listen to this


def _exists(directory: Path) -> bool:
    with suppress(OSError), _socket() as owner:
        owner.connect(str(directory / "owner"))
        return True
    return False


def _server(environment: Mapping[str, str], imports: Sequence[str]) -> str | None:
    """The socket of a server of this environment that has the imports, made if there is none; None without a family.

    Raises: OSError if the family is over.
    """
    directory = os.environ.get(FAMILY)
    if not directory or not Path(directory).is_dir():  # the directory of another machine's family
        return None
    variables = {name: value for name, value in environment.items() if name not in _PER_PROCESS}
    kind = hashlib.sha256(json.dumps([sys.executable, sorted(variables.items())]).encode()).hexdigest()[:12]
    with (Path(directory) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = sorted(Path(directory).glob(f"{kind}-*.json"))
        for file in known:
            if set(imports) <= set(json.loads(file.read_text())):
                return str(file.with_suffix(""))
        path = Path(directory) / f"{kind}-{len(known)}"
        _start_server(path, variables, imports)
        path.with_suffix(".json").write_text(json.dumps(list(imports)))
        return str(path)


def _start_server(path: Path, variables: Mapping[str, str], imports: Sequence[str]) -> None:
    """Requests can be sent at once: they wait in the socket until the server has imported its modules."""
    with _socket() as listener, _socket() as owner, path.with_suffix(".log").open("w") as log:
        owner.connect(str(path.parent / "owner"))
        listener.bind(str(path))
        listener.listen(_MOST_SERVERS)
        descriptors = (listener.fileno(), owner.fileno())
        # -P: neither the directory nor PYTHONPATH of the first child is the others'.
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlpost.cluster.forkserver", *map(str, descriptors), *imports],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=variables,
            pass_fds=descriptors,
            start_new_session=True,
        )
    _started.append(server)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX)


class _Fork:
    """A child of a forkserver. The connection to the server stays open for as long as this process cares for the child.

    Raises: OSError if there is no such server any more.
    """

    def __init__(self, server: str, request: Request) -> None:
        self._connection = _socket()
        self._received = b""
        self._code: int | None = None
        self._connection.connect(server)
        request.send(self._connection)
        pid = self._number()
        if pid is None:
            raise ConnectionError(f"the forkserver {server} has ended")
        self.pid = pid

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, sig: int) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def _ended(self, timeout: float | None) -> int | None:
        if self._code is None and (self._received or select.select([self._connection], [], [], timeout)[0]):
            code = self._number()
            # A server that is gone takes its children along.
            self._code = -signal.SIGKILL if code is None else code
        return self._code

    def _number(self) -> int | None:
        """The server's next line; None if the server has ended."""
        while b"\n" not in self._received:
            data = self._connection.recv(64)
            if not data:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return int(line)
