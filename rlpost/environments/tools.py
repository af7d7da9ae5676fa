"""Python functions as tools: the model writes calls as JSON, the environment makes them and answers with the results."""

import functools
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpost.environments.protocol import Episode, Reply
from rlpost.errors import UserError
from rlpost.types import Example

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
LONGEST_RESULT = 10_000  # characters


class Tools:
    """Calls as Qwen's, Hermes' and SmolLM3's chat templates have them:

        <tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>

    Each call of a turn is answered by a message of its own. A turn without one is the answer, and ends the episode.

    Args:
        functions: with type hints, and a docstring that describes each argument (Google's style): the chat template shows both
            to the model. They return anything that has a text.
        role: the role of the messages with results.
        timeout: seconds a call may take.

    Raises: UserError for a function without hints or descriptions, or two of one name.
    """

    stop: Sequence[str] = ()

    def __init__(self, functions: Sequence[Callable[..., Any]], role: str = "tool", timeout: float = 10.0) -> None:
        self.tools = [_schema(function) for function in functions]
        names = [tool["function"]["name"] for tool in self.tools]
        self.functions = dict(zip(names, functions, strict=True))
        if len(self.functions) < len(functions):
            raise UserError(f"environment.functions: two have the same name ({', '.join(sorted(names))})")
        self.role, self.timeout = role, timeout

    def reset(self, example: Example, seed: int) -> Episode:
        return _Session(self)


class _Session:
    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def step(self, completion: str) -> Reply:
        calls = _CALL.findall(completion)
        return Reply([self._answer(call) for call in calls], done=not calls)

    def _answer(self, written: str) -> Mapping[str, str]:
        try:
            name, arguments = _parsed(written)
            if name not in self._tools.functions:
                raise ValueError(f"there is no tool {name!r}, only {', '.join(self._tools.functions)}")
            text = self._called(name, arguments)
        except ValueError as error:
            name, text = "", f"error: {error}"
        return {"role": self._tools.role, "content": text, **({"name": name} if name else {})}

    def _called(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises: ValueError with what the model may read, whatever goes wrong."""
        function = self._tools.functions[name]
        try:
            bound = inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None
        outcome: list[tuple[str, bool]] = []

        def run() -> None:
            try:
                outcome.append((str(function(*bound.args, **bound.kwargs)), True))
            except Exception as error:  # a tool may raise anything; the model reads it and goes on
                outcome.append((f"{name}: {type(error).__name__}: {error}", False))

        # A thread that is waited for no longer is all that can be had: what it called may hold on to this process's state.
        thread = threading.Thread(target=run, daemon=True, name=f"tool {name}")
        thread.start()
        thread.join(self._tools.timeout)
        text, worked = outcome[0] if outcome else (f"{name}: no result within {self._tools.timeout:g} s", False)
        if not worked:
            raise ValueError(text[:LONGEST_RESULT])
        return text[:LONGEST_RESULT]


def _parsed(written: str) -> tuple[str, Mapping[str, Any]]:
    try:
        call = json.loads(written)
    except (ValueError, RecursionError):
        raise ValueError("the call is not JSON") from None
    well_formed = (
        isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments", {}), dict)
    )
    if not well_formed:
        raise ValueError('a call has the form {"name": "...", "arguments": {...}}')
    return call["name"], call.get("arguments", {})


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    """A function as chat templates show it."""
    from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

    plain = function.func if isinstance(function, functools.partial) else function
    try:
        return get_json_schema(plain)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise UserError(f"environment.functions: {error}") from None
