"""Requests spread over HTTP servers, some of which fail: each is answered exactly once, or the call raises."""

import asyncio
import heapq
import logging
import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from rlpost.rollout.server_process import ServerProcess

log = logging.getLogger(__name__)

T = TypeVar("T")
Body = Mapping[str, Any]
_MAX_PAUSE_S = 30.0


class TransientError(Exception):
    """A failure that may be over when the request is sent again."""


class ServerLostError(Exception):
    """A server that is not asked again."""


@dataclass(eq=False)
class Server:
    """Attributes: lost: why it is not asked any more; None while it is."""

    url: str
    process: ServerProcess | None = None  # None: it was started by somebody else
    lost: str | None = None


class ServerPool:
    """Servers, and an event loop in a thread of its own that talks to them.

    A request goes to the live server with the fewest under way. One that fails is sent again after a growing pause. A server
    is lost where a request failed `retries` + 1 times in a row, after three health checks in a row without an answer,
    and when its process has ended; what it had under way goes to the others, before what nobody has yet.

    Args:
        concurrency: requests under way at one server.
        pause_s: seconds before a request is sent again; doubled each time.
        health_s: seconds between health checks, and that one may take.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        concurrency: int,
        retries: int = 5,
        pause_s: float = 0.5,
        health_s: float = 10.0,
    ) -> None:
        self.servers = list(servers)
        self.num_retries = 0
        self.num_moved = 0
        self._concurrency, self._retries, self._pause_s, self._health_s = concurrency, retries, pause_s, health_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()
        self._session = self._wait(self._open())

    @property
    def live(self) -> list[Server]:
        """Raises: RuntimeError if there is none."""
        if live := [server for server in self.servers if server.lost is None]:
            return live
        reasons = "; ".join(f"{server.url}: {server.lost}" for server in self.servers)
        raise RuntimeError(f"no rollout server is left ({reasons})")

    def run(self, path: str, bodies: Sequence[Body], read: Callable[[Any], T]) -> Iterator[tuple[int, T]]:
        """POST each body to some server. Yields: its index and what `read` made of the answer, as they come.

        Args: read: may raise TransientError.

        Raises: RuntimeError if no server is left, or one refuses a request.
        """
        answers: queue.SimpleQueue[tuple[int, T] | None] = queue.SimpleQueue()
        call = asyncio.run_coroutine_threadsafe(self._run(path, bodies, read, answers.put), self._loop)
        call.add_done_callback(lambda _: answers.put(None))
        try:
            while (answer := answers.get()) is not None:
                yield answer
            call.result()
        finally:
            call.cancel()

    def each(self, requests: Sequence[tuple[str, Body]]) -> None:
        """POST the same requests, in their order, to every live server. One where this fails is lost.

        Raises: RuntimeError if no server is left.
        """

        async def ask(server: Server) -> None:
            for path, body in requests:
                await self._ask(server, path, body, lambda answer: None)

        async def ask_or_lose(server: Server) -> None:
            asking, watch = asyncio.create_task(ask(server)), asyncio.create_task(self._watch(server))
            await asyncio.wait([asking, watch], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                self._lose(server, watch.result())
            elif error := asking.exception():
                self._lose(server, str(error))
            asking.cancel()
            watch.cancel()

        async def ask_all() -> None:
            await asyncio.gather(*map(ask_or_lose, self.live))

        self._wait(ask_all())
        assert self.live

    def health(self, server: Server) -> str | None:
        """None if the server is well, or what is wrong with it."""
        return self._wait(self._health(server))

    def post(self, server: Server, path: str, body: Body) -> Any:
        """One request to one server, once. Returns: its answer. Raises: TransientError, RuntimeError."""
        return self.begin(server, path, body).result()

    def begin(self, server: Server, path: str, body: Body) -> "Future[Any]":
        """`post`, without waiting."""
        return asyncio.run_coroutine_threadsafe(self._post(server, path, body), self._loop)

    def check(self, servers: Sequence[Server]) -> None:
        """Servers that are not well are lost."""

        async def check(server: Server) -> None:
            if (reason := await self._health(server)) is not None:
                self._lose(server, reason)

        async def check_all() -> None:
            await asyncio.gather(*map(check, servers))

        self._wait(check_all())

    def close(self) -> None:
        """Calls that are under way end with CancelledError."""
        self._wait(self._cancel())
        processes = [server.process for server in self.servers if server.process is not None]
        for process in processes:
            process.stop()
        for process in processes:
            process.end()
        self._wait(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _open(self) -> aiohttp.ClientSession:
        # A completion takes as long as it takes. uvicorn closes idle connections after 5 s: not to be surprised by that.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._health_s)
        return aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def _run(
        self, path: str, bodies: Sequence[Body], read: Callable[[Any], T], deliver: Callable[[tuple[int, T]], None]
    ) -> None:
        waiting = list(range(len(bodies)))  # a heap of indices: each is in here, under way, or delivered
        running: dict[asyncio.Task[T], tuple[Server, int]] = {}
        watches = {asyncio.create_task(self._watch(server)): server for server in self.live}
        try:
            while waiting or running:
                busy = Counter(server for server, _ in running.values())
                while waiting and busy[server := min(self.live, key=busy.__getitem__)] < self._concurrency:
                    index = heapq.heappop(waiting)
                    running[asyncio.create_task(self._ask(server, path, bodies[index], read))] = server, index
                    busy[server] += 1
                done, _ = await asyncio.wait([*running, *watches], return_when=asyncio.FIRST_COMPLETED)
                for watch in [watch for watch in watches if watch in done]:
                    self._lose(watches[watch], watch.result())
                for task in [task for task in running if task in done]:
                    server, index = running[task]
                    try:
                        deliver((index, task.result()))
                        del running[task]
                    except ServerLostError as error:
                        self._lose(server, str(error))
                for task, (server, index) in list(running.items()):
                    if server.lost is not None:
                        task.cancel()
                        del running[task]
                        heapq.heappush(waiting, index)
                        self.num_moved += 1
                watches = {task: server for task, server in watches.items() if not task.done()}
        finally:
            for task in (*running, *watches):
                task.cancel()

    async def _watch(self, server: Server) -> str:
        """Returns: the fault of the server, once there is one."""
        failed, reason = 0, None
        while failed < 3:
            await asyncio.sleep(self._health_s)
            reason = await self._health(server)
            failed = 0 if reason is None else failed + 1
        return f"three health checks failed ({reason})"

    async def _health(self, server: Server) -> str | None:
        try:
            timeout = aiohttp.ClientTimeout(self._health_s)
            async with self._session.get(f"{server.url}/health", timeout=timeout) as answer:
                return None if answer.status == 200 else f"HTTP {answer.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return _text(error)

    async def _ask(self, server: Server, path: str, body: Body, read: Callable[[Any], T]) -> T:
        """Raises: ServerLostError; RuntimeError if the server refuses the request."""
        reason = ""
        for attempt in range(self._retries + 1):
            if attempt:
                self.num_retries += 1
                await asyncio.sleep(min(_MAX_PAUSE_S, self._pause_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1))
            try:
                return read(await self._post(server, path, body))
            except TransientError as error:
                reason = str(error)
                log.info("%s%s: %s", server.url, path, reason)
                if server.process is not None and (exited := server.process.exited()):
                    raise ServerLostError(exited) from None
        raise ServerLostError(f"{path} failed {self._retries + 1} times ({reason})")

    async def _post(self, server: Server, path: str, body: Body) -> Any:
        try:
            async with self._session.post(f"{server.url}{path}", json=body) as answer:
                if answer.status == 200:
                    return await answer.json(content_type=None)
                text = " ".join((await answer.text()).split())[:300]
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise TransientError(_text(error)) from None
        if answer.status >= 500 or answer.status in (408, 429):
            raise TransientError(f"HTTP {answer.status}: {text}")
        raise RuntimeError(f"{server.url}{path} refused a request (HTTP {answer.status}): {text}")

    def _lose(self, server: Server, reason: str) -> None:
        if server.lost is None:
            server.lost = reason
            log.warning("the rollout server %s is lost: %s", server.url, reason)
            if server.process is not None:
                self._loop.run_in_executor(None, server.process.end)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
