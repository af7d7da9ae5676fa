"""Processes that call reward functions while the run samples on, where a hang or a crash can be ended."""

import queue
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe
from typing import Any

from rlpost.cluster.process import start
from rlpost.errors import UserError
from rlpost.rewards.function import Arguments, CallError, Outcome, WrongLengthError, outcomes

START_SECONDS = 300.0  # imports, on a busy machine


class ScoringProcesses:
    """A number of processes, each with every function, that take one group at a time.

    Args:
        module: the module that a process runs. Its argument is the number of a file descriptor, a
            `multiprocessing.Connection`, to talk
            over: `definitions` come first, which it answers with None or what is wrong with them; then (name, arguments)
            again and again, which it answers with ("values", ...), ("error", (reason, traceback)) or ("length", reason).
        names: the functions.
        definitions: whatever the module makes functions from.
        timeout: seconds a completion may take; a call has that many for each of its completions.
    """

    def __init__(self, module: str, names: Sequence[str], definitions: Any, count: int, timeout: float) -> None:
        self.names = list(names)
        self._all = [_Process(module, definitions, timeout) for _ in range(count)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._all:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="scoring")

    def wait_until_ready(self) -> None:
        """Raises: UserError if the functions cannot be made."""
        for process in self._all:
            process.wait_until_ready()

    def submit(self, names: Sequence[str], arguments: Arguments) -> Future[dict[str, list[Outcome]]]:
        """Have a group scored by these functions."""
        return self._threads.submit(self._score, names, arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.kill()

    def _score(self, names: Sequence[str], arguments: Arguments) -> dict[str, list[Outcome]]:
        process = self._idle.get()
        try:
            return {name: outcomes(name, partial(process.call, name), arguments) for name in names}
        finally:
            self._idle.put(process)


class _Process:
    def __init__(self, module: str, definitions: Any, timeout: float) -> None:
        self._module, self._definitions, self._timeout = module, definitions, timeout
        self._start()

    def call(self, name: str, arguments: Arguments) -> list[float | None]:
        """Raises: CallError, WrongLengthError."""
        self.wait_until_ready()
        limit = self._timeout * len(arguments["completions"])
        reply: tuple[str, Any] = ("error", (f"took over {limit:g} s and was stopped", ""))
        try:
            self._connection.send((name, dict(arguments)))
            answered = self._connection.poll(limit)
            if answered:
                reply = self._connection.recv()
        except (EOFError, OSError):
            answered, reply = False, ("error", (f"ended its process ({self._exit()})", ""))
        if not answered:
            self.kill()
            self._start()
        kind, value = reply
        if kind == "error":
            raise CallError(*value)
        if kind == "length":
            raise WrongLengthError(value)
        return value

    def wait_until_ready(self) -> None:
        if self._is_ready:
            return
        try:
            wrong = (
                self._connection.recv() if self._connection.poll(START_SECONDS) else f"not ready in {START_SECONDS:g} s"
            )
        except EOFError:
            wrong = f"a scoring process ended as it started ({self._exit()})"
        if wrong is not None:
            raise UserError(wrong)
        self._is_ready = True

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        self._process = start(self._module, passed=[theirs.fileno()], death_signal=signal.SIGKILL)
        theirs.close()
        self._connection.send(self._definitions)
        self._is_ready = False

    def _exit(self) -> str:
        code = self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
