"""A judge: a language model behind an OpenAI-compatible endpoint that is asked about each completion."""

import asyncio
import hashlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from openai import AsyncOpenAI

from rlpost.errors import UserError

PROMPT = """Question:
{question}

Reference answer:
{answer}

Response:
{completion}

Is the response's final answer equal to the reference answer? Reply with one word: yes or no."""


class JudgeReward:
    """The judge's reply, read as a number. It is a coroutine: all requests of a step are in flight together.

    Args:
        model: the judge's name at the endpoint.
        base_url: http://host:port/v1 of a server (vLLM's, say); None is OpenAI's own.
        api_key_env: the environment variable that holds the key; None sends none. The key itself is never in a config.
        prompt: the user message; {question}, {answer}, {completion} and the task's columns are filled in.
        system: the system message.
        pattern: a regular expression whose last match in the reply is the verdict (its group 1 if it has one).
        values: the numbers that verdicts stand for, by lower-case text; None reads the verdict as a number.
        scale: the divisor of a number.
        temperature, max_tokens: settings of the judge's sampling.
        requests_per_minute: None is as many as `concurrency` allows.
        concurrency: requests in flight.
        timeout, retries: seconds a request may take, and how often one that failed is sent again, with growing pauses.
        cache: a file that keeps replies over runs; None keeps them for this run only.

    Raises: UserError if the key's variable is not set, or the pattern is not a regular expression.
    """

    requires_packages: ClassVar[Mapping[str, str]] = {"openai": "judge"}

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key_env: str | None = None,
        prompt: str = PROMPT,
        system: str | None = None,
        pattern: str = r"(?i)\b(yes|no)\b",
        values: Mapping[str, float] | None = None,
        scale: float = 1.0,
        temperature: float = 0.0,
        max_tokens: int = 16,
        requests_per_minute: float | None = None,
        concurrency: int = 32,
        timeout: float = 60.0,
        retries: int = 4,
        cache: str | None = None,
    ) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise UserError(f"reward: pattern={pattern}: not a regular expression ({error})") from None
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise UserError(f"reward: api_key_env={api_key_env}: this environment variable is not set; export it")
        key = os.environ[api_key_env] if api_key_env else "none"
        self._client = AsyncOpenAI(base_url=base_url, api_key=key, timeout=timeout, max_retries=retries)
        self._prompt, self._system = prompt, system
        self._values = {"yes": 1.0, "no": 0.0} if values is None and "yes" in pattern else values
        self._scale = scale
        self._settings = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._pace = _Pace(requests_per_minute, concurrency)
        self._replies = _Replies(cache)

    async def __call__(
        self,
        *,
        completions: list[str],
        answers: list[str | None],
        messages: list[list[dict[str, Any]]],
        **columns: Any,
    ) -> list[float]:
        rows = [
            {
                **{name: values[i] for name, values in columns.items() if isinstance(values, list)},
                "question": messages[i][-1]["content"] if messages[i] else "",
                "answer": answers[i],
                "completion": completion,
            }
            for i, completion in enumerate(completions)
        ]
        return list(await asyncio.gather(*map(self._verdict, rows)))

    async def _verdict(self, row: Mapping[str, Any]) -> float:
        asked: list[dict[str, str]] = [] if self._system is None else [{"role": "system", "content": self._system}]
        asked.append({"role": "user", "content": self._prompt.format_map(row)})
        request = {**self._settings, "messages": asked}
        reply = self._replies.get(request)
        if reply is None:
            async with self._pace:
                answered = await self._client.chat.completions.create(**request)
            reply = answered.choices[0].message.content or ""
            self._replies.put(request, reply)
        return self._read(reply)

    def _read(self, reply: str) -> float:
        found = list(self._pattern.finditer(reply))
        if not found:
            raise ValueError(f"the judge replied {reply[:100]!r}, in which the pattern finds no verdict")
        verdict = found[-1].group(1 if self._pattern.groups else 0)
        if self._values is not None:
            return self._values[verdict.casefold()] / self._scale
        return float(verdict) / self._scale


class _Pace:
    """A limit on requests: so many a minute, evenly spaced, and so many at once."""

    def __init__(self, per_minute: float | None, at_once: int) -> None:
        self._interval = 60.0 / per_minute if per_minute else 0.0
        self._slots = asyncio.Semaphore(at_once)
        self._next = 0.0

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        now = time.monotonic()
        start = max(now, self._next)
        self._next = start + self._interval
        await asyncio.sleep(start - now)

    async def __aexit__(self, *_: object) -> None:
        self._slots.release()


class _Replies:
    """Replies by request: asked the same again, a judge is not."""

    def __init__(self, file: str | None) -> None:
        if file is not None:
            Path(file).expanduser().parent.mkdir(parents=True, exist_ok=True)
        path = ":memory:" if file is None else str(Path(file).expanduser())
        # Made in one thread and used in the event loop's; other runs may write to the file too.
        self._store = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        self._store.execute("CREATE TABLE IF NOT EXISTS replies (request TEXT PRIMARY KEY, reply TEXT)")

    def get(self, request: Mapping[str, Any]) -> str | None:
        row = self._store.execute("SELECT reply FROM replies WHERE request = ?", (_digest(request),)).fetchone()
        return None if row is None else row[0]

    def put(self, request: Mapping[str, Any], reply: str) -> None:
        self._store.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (_digest(request), reply))


def _digest(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
