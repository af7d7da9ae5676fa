"""Requests over servers that fail in every way: each answered exactly once, or the call raises."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from rlpost.rollout.server_pool import Server, ServerPool, TransientError
from tests.rollout.fake_server import Behave, FakeServer, token_ids

GENERATE = "/inference/v1/generate"


@contextmanager
def pool_of(*behaviours: Behave, **settings: Any) -> Iterator[tuple[ServerPool, list[FakeServer]]]:
    with ExitStack() as stack:
        fakes = [stack.enter_context(FakeServer(behave)) for behave in behaviours]
        defaults = {"concurrency": 4, "retries": 3, "pause_s": 0.001, "health_s": 30.0}
        pool = ServerPool([Server(fake.url) for fake in fakes], **{**defaults, **settings})
        try:
            yield pool, fakes
        finally:
            pool.close()


def bodies(count: int) -> list[dict[str, Any]]:
    return [{"token_ids": [i], "sampling_params": {"seed": i}} for i in range(count)]


def read(answer: Any) -> list[int]:
    (choice,) = answer["choices"]
    if choice["finish_reason"] == "abort":
        raise TransientError("abort")
    return choice["token_ids"]


def expected(requests: Sequence[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    return [(place, token_ids(body)) for place, body in enumerate(requests)]


def answering(body: dict[str, Any]) -> str:
    return "answer"


@pytest.mark.parametrize("seed", range(8))
def test_each_request_is_answered_once_whatever_fails(seed: int) -> None:
    draw = random.Random(seed)
    lock = threading.Lock()

    def unreliable(body: dict[str, Any]) -> str:
        with lock:
            return draw.choices(["answer", "error", "drop", "abort"], [6, 1, 1, 1])[0]

    def dying_after(count: int) -> Behave:
        left = iter(["answer"] * count)
        return lambda body: next(left, "drop")

    requests = bodies(60)
    with pool_of(unreliable, dying_after(draw.randrange(12)), answering, retries=6) as (pool, fakes):
        assert sorted(pool.run(GENERATE, requests, read)) == expected(requests)
        lost = [server.lost is not None for server in pool.servers]
        assert lost[1:] == [True, False]
        assert "failed 7 times (ServerDisconnected" in str(pool.servers[1].lost)
        assert pool.num_moved >= 1
        assert pool.num_retries >= 6
        asked = len(fakes[1].asked)
        assert sorted(pool.run(GENERATE, requests, read)) == expected(requests)
        assert len(fakes[1].asked) == asked  # lost for good


def test_a_server_without_an_answer_to_health_checks_gives_its_requests_to_others() -> None:
    requests = bodies(12)
    with pool_of(lambda body: "hang", answering, health_s=0.05) as (pool, fakes):
        fakes[0].frozen = True
        assert sorted(pool.run(GENERATE, requests, read)) == expected(requests)
        assert str(pool.servers[0].lost).startswith("three health checks failed")
        assert (pool.num_moved, pool.num_retries) == (4, 0)


def test_what_each_server_is_asked_loses_those_that_fail_and_those_that_hang() -> None:
    with pool_of(answering, answering, answering, health_s=0.05) as (pool, fakes):
        fakes[0].frozen = True
        pool.servers[1].url = "http://127.0.0.1:9"
        pool.each([("/pause", {}), ("/resume", {})])
        assert [server.lost is None for server in pool.servers] == [False, False, True]
        assert str(pool.servers[0].lost).startswith("three health checks failed")
        assert str(pool.servers[1].lost).startswith("/pause failed 4 times (Client")
        assert fakes[2].asked == [("/pause", {}), ("/resume", {})]
        fakes[2].frozen = True
        with pytest.raises(RuntimeError, match="no rollout server is left"):
            pool.each([("/pause", {})])


def test_work_goes_to_the_server_with_the_least_under_way() -> None:
    requests = bodies(20)
    with pool_of(lambda body: "hang", answering, concurrency=2) as (pool, fakes):
        answers = pool.run(GENERATE, requests, read)
        first = [next(answers) for _ in range(18)]
        assert Counter(path for path, _ in fakes[0].asked) == {GENERATE: 2}
        assert len(fakes[1].asked) == 18
        assert len({place for place, _ in first}) == 18
        answers.close()


def test_without_a_server_left_the_call_says_which_and_why() -> None:
    with pool_of(lambda body: "error", lambda body: "drop") as (pool, fakes):
        with pytest.raises(RuntimeError) as raised:
            list(pool.run(GENERATE, bodies(5), read))
        message = str(raised.value)
        assert message.startswith("no rollout server is left (")
        assert all(fake.url in message for fake in fakes)
        assert "HTTP 500" in message
        assert "ServerDisconnected" in message
        assert "\n" not in message


def test_a_refused_request_ends_the_call_at_once() -> None:
    with pool_of(lambda body: "refuse") as (pool, fakes):
        with pytest.raises(RuntimeError, match=r"refused a request \(HTTP 400\): .*no room"):
            list(pool.run(GENERATE, bodies(1), read))
        assert len(fakes[0].asked) == 1
        assert pool.servers[0].lost is None


def test_a_call_that_is_given_up_leaves_the_pool_usable() -> None:
    requests = bodies(40)
    with pool_of(answering) as (pool, _):
        answers = pool.run(GENERATE, requests, read)
        next(answers)
        answers.close()
        assert sorted(pool.run(GENERATE, requests, read)) == expected(requests)


def test_closing_ends_a_call_that_another_thread_waits_for() -> None:
    with FakeServer(lambda body: "hang") as fake:
        pool = ServerPool([Server(fake.url)], concurrency=4, retries=0, health_s=30.0)
        ended: list[BaseException] = []

        def call() -> None:
            try:
                list(pool.run(GENERATE, bodies(3), read))
            except CancelledError as error:
                ended.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        while not fake.asked:
            time.sleep(0.01)
        pool.close()
        thread.join()
        assert len(ended) == 1
