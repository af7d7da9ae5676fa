"""Reward functions that wait for others (servers, say): the calls of all groups are in flight together."""

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from rlpost.rewards.function import Arguments, CallError, Outcome, RewardFunction, call, outcomes

GROUPS_IN_FLIGHT = 64  # threads that wait


class Coroutines:
    """One event loop, in a thread, for every call: a function's locks and connections belong to a loop.

    Args: timeout: seconds a completion may take; a call has that many for each of its completions.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()
        self._threads = ThreadPoolExecutor(GROUPS_IN_FLIGHT, thread_name_prefix="waiting")

    def submit(self, name: str, function: RewardFunction, arguments: Arguments) -> Future[list[Outcome]]:
        return self._threads.submit(outcomes, name, partial(self._call, function), arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _call(self, function: RewardFunction, arguments: Arguments) -> list[float | None]:
        limit = self._timeout * len(arguments["completions"])

        def wait(coming: Awaitable[Any]) -> Any:
            try:
                return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coming, limit), self._loop).result()
            except TimeoutError as error:
                raise CallError(f"took over {limit:g} s and was stopped") from error

        return call(function, arguments, wait)
