"""The program of a scoring process: reward functions are made from their configuration, and called until the run is over."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rlpost.config.build import build
from rlpost.errors import UserError
from rlpost.rewards.function import CallError, WrongLengthError, call

logging.basicConfig(level=logging.WARNING, format="rlpost: scoring: %(message)s")


def main(descriptor: str) -> None:
    """The other side of `rlpost.rewards.processes`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's to handle: it ends this process when it ends
    os.nice(5)  # sampling goes first
    _use_one_thread()
    with (
        suppress(EOFError, ConnectionError),
        Connection(int(descriptor)) as connection,
    ):  # these end it: the run is over
        _serve(connection)


def _use_one_thread() -> None:
    """The other cores are the engine's. Libraries that are loaded already, in a fork, do not look at the variable again."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("GLIBC_TUNABLES", None)  # the trainer's, which a program started from here need not have
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "numpy" in sys.modules:
        from threadpoolctl import threadpool_limits

        threadpool_limits(1)


def _serve(connection: Connection) -> None:
    nodes: dict[str, dict[str, Any]] = connection.recv()
    try:
        functions = {name: build(node) for name, node in nodes.items()}
    except UserError as error:
        connection.send(str(error))
        return
    except Exception as error:
        connection.send(f"reward: {type(error).__name__}: {error}")
        return
    connection.send(None)
    with asyncio.Runner() as runner:  # one loop for all calls: a function's locks and connections belong to a loop
        while True:
            name, arguments = connection.recv()
            connection.send(_answer(functions[name], arguments, runner))


def _answer(function: Any, arguments: dict[str, Any], runner: asyncio.Runner) -> tuple[str, Any]:
    async def wait(coming: Awaitable[Any]) -> Any:
        return await coming

    try:
        return "values", call(function, arguments, lambda coming: runner.run(wait(coming)))
    except CallError as error:
        return "error", (str(error), error.details)
    except WrongLengthError as error:
        return "length", str(error)


if __name__ == "__main__":
    main(sys.argv[1])
