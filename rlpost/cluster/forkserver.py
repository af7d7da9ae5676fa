"""A process that has imported what workers import, and forks each of them from itself.

    python -P -m rlpost.cluster.forkserver LISTENER OWNER MODULE...

`rlpost.cluster.process` starts it and asks it for processes. It imports the modules and does nothing else: no thread pool, no
database and no CUDA context may exist when it forks, since a fork inherits none of them whole. A child then runs its module
as `python -m` would, with a working directory, environment, arguments, streams, signal handlers and random numbers of its own.

A request is answered with two lines: the child's process id, and when it has ended its exit code (-9 after SIGKILL). If the
connection is closed before that, the child gets its death signal. The server ends with its last child once its owner is gone.
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rlpost.cluster.node import end_with_parent, name_process

# In a fork's environment: the socket of the server it is from, and what the server's imports did to variables, as JSON:
# {name: [value before or null, value after]}.
SERVER, CHANGED = "RLPOST_FORKSERVER", "RLPOST_FORKSERVER_CHANGED"
_HEADER = 4  # bytes that hold a request's length
_MOST_DESCRIPTORS = 16
_FREE = 100  # descriptors that a child is given are first moved above this number, out of the way of its streams


@dataclass(frozen=True)
class Request:
    """A module that is to run in a process of its own.

    Attributes:
        module: the module to run, as behind `python -m`.
        arguments: the numbers of the passed descriptors are appended to them.
        directory: the child's working directory.
        environment: all of the child's variables; what the imports set themselves is added.
        cores: the cores that the child may run on.
        death_signal: sent to the child when whoever asked for it is gone.
        descriptors: standard input, output and error, then those that are passed.
    """

    module: str
    arguments: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    cores: Sequence[int]
    death_signal: int
    descriptors: Sequence[int] = ()

    def send(self, connection: socket.socket) -> None:
        fields = {name: value for name, value in vars(self).items() if name != "descriptors"}
        text = json.dumps(fields).encode()
        socket.send_fds(connection, [len(text).to_bytes(_HEADER, "big")], list(self.descriptors))
        connection.sendall(text)

    @staticmethod
    def receive(connection: socket.socket) -> "Request":
        """Raises: EOFError if whoever asked is gone already."""
        header, descriptors, _, _ = socket.recv_fds(connection, _HEADER, _MOST_DESCRIPTORS)
        length = int.from_bytes(header, "big")
        with connection.makefile("rb") as stream:
            text = stream.read(length)
        if len(header) < _HEADER or len(text) < length:
            for descriptor in descriptors:
                os.close(descriptor)
            raise EOFError
        return Request(**json.loads(text), descriptors=descriptors)


class _Server:
    """Args: changed: variables that the imports have set: their values before (None: there was none) and after."""

    def __init__(
        self, listener: socket.socket, owner: socket.socket, changed: Mapping[str, tuple[str | None, str]]
    ) -> None:
        self._listener, self._owner, self._changed = listener, owner, changed
        self._pid = os.getpid()
        self._is_owned = True
        self._asked_for: dict[int, tuple[socket.socket, int]] = {}  # by child: who asked for it, and its death signal
        self._selector = selectors.DefaultSelector()
        self._child_ended, wakeup = socket.socketpair()
        for end in (self._child_ended, wakeup):
            end.setblocking(False)
        self._wakeup = wakeup
        signal.set_wakeup_fd(wakeup.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # the wake-up needs a handler
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._owner, selectors.EVENT_READ, self._owner_is_gone)
        self._selector.register(self._child_ended, selectors.EVENT_READ, self._reap)

    def serve(self) -> None:
        """The server runs until the owner is gone and the last child has ended."""
        while self._is_owned or self._asked_for:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            request = Request.receive(connection)
        except EOFError:
            connection.close()
            return
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become(request)
        for descriptor in request.descriptors:
            os.close(descriptor)
        self._asked_for[pid] = (connection, request.death_signal)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._nobody_waits_for(pid))
        self._tell(connection, pid)

    def _reap(self) -> None:
        self._child_ended.recv(4096)
        while self._asked_for:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection, _ = self._asked_for.pop(pid)
            self._tell(connection, os.waitstatus_to_exitcode(status))
            self._let_go(connection)

    def _nobody_waits_for(self, pid: int) -> None:
        """The process that asked for a child is gone: the child shall end, as a killed process's own would."""
        if pid not in self._asked_for:
            return  # it ended in this very moment
        connection, death_signal = self._asked_for[pid]
        self._let_go(connection)
        os.kill(pid, death_signal)

    def _owner_is_gone(self) -> None:
        self._is_owned = False
        self._selector.unregister(self._owner)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _tell(self, connection: socket.socket, number: int) -> None:
        try:
            connection.sendall(f"{number}\n".encode())
        except OSError:  # gone, which the selector reports too
            return

    def _let_go(self, connection: socket.socket) -> None:
        if connection.fileno() >= 0:
            self._selector.unregister(connection)
            connection.close()

    def _become(self, request: Request) -> NoReturn:
        """The child gets everything that a new process would have of its own, and runs the module."""
        code = 1
        try:
            os.setsid()
            end_with_parent(signal.Signals(request.death_signal))
            if os.getppid() != self._pid:
                os.kill(os.getpid(), request.death_signal)
            name_process(request.module)
            signal.set_wakeup_fd(-1)
            for number, action in (
                (signal.SIGCHLD, signal.SIG_DFL),
                (signal.SIGTERM, signal.SIG_DFL),
                (signal.SIGINT, signal.default_int_handler),
            ):
                signal.signal(number, action)
            os.environ.clear()
            os.environ.update(request.environment)
            for name, (before, after) in self._changed.items():
                if os.environ.get(name) == before:
                    os.environ[name] = after
            os.environ[SERVER] = self._listener.getsockname()
            os.environ[CHANGED] = json.dumps(self._changed)
            self._selector.close()
            others = [connection for connection, _ in self._asked_for.values()]
            for own in (self._listener, self._owner, self._child_ended, self._wakeup, *others):
                own.close()
            arguments = [*request.arguments, *_take_over(request.descriptors)]
            os.chdir(request.directory)
            os.sched_setaffinity(0, request.cores)
            _own_random_numbers()
            gc.enable()
            code = run_as_main(request.module, arguments)
        except BaseException:
            traceback.print_exc()
        finally:  # what an interpreter does at its end, but for taking every object apart
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - it is CPython's own
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)


def run_as_main(module: str, arguments: Sequence[str]) -> int:
    """Run a module as `python -m module arguments` would. Returns: its exit code."""
    sys.path[:] = search_path(sys.path, os.getcwd(), os.environ.get("PYTHONPATH", ""))
    sys.argv[:] = [module, *arguments]
    sys.modules.pop(module, None)  # it runs as __main__, and is nobody else's
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    return 0


def search_path(server_path: Sequence[str], directory: str, pythonpath: str) -> list[str]:
    """A new interpreter's search path in the directory: it, PYTHONPATH's entries, and the installation.

    Args: server_path: the path of a server that has neither of its own (it is started with -P, and its PYTHONPATH is the
        children's).
    """
    own = [directory, *(os.path.abspath(entry) for entry in pythonpath.split(os.pathsep) if entry)]
    return [*own, *(entry for entry in server_path if entry not in own)]


def _take_over(descriptors: Sequence[int]) -> list[str]:
    """Make the first three the standard streams. Returns: the numbers of the others."""
    moved = []
    for descriptor in descriptors:
        moved.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FREE))
        os.close(descriptor)
    for stream, descriptor in enumerate(moved[:3]):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    return [str(descriptor) for descriptor in moved[3:]]


def _own_random_numbers() -> None:
    """Generators that a library seeded from the system as it was imported; torch's begins with the same number everywhere."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def main(listener: int, owner: int, modules: Sequence[str]) -> None:
    before = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # what was imported stays, in every child too
    changed = {name: (before.get(name), value) for name, value in os.environ.items() if before.get(name) != value}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    own = socket.socket(fileno=listener)
    directory = os.path.dirname(own.getsockname())
    _Server(own, socket.socket(fileno=owner), changed).serve()
    # All servers of a family end for the same reason, and the owner may have been killed before it could clean up.
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    gc.disable()
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    os._exit(0)  # taking a million objects apart one by one takes seconds
