"""The protocol of reward functions, their arguments, and one call."""

import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlpost.types import Rollout

Arguments = Mapping[str, Any]


class RewardFunction(Protocol):
    def __call__(
        self, *, prompts: list[str], completions: list[str], answers: list[str | None], **others: Any
    ) -> Sequence[float | None] | Awaitable[Sequence[float | None]]:
        """One finite number a completion, or None where the function does not apply; it may be a coroutine.

        It is called once for each group: all completions of one prompt. A column of the task that has the name of an
        argument below is not passed.

        Args:
            prompts: the rendered prompts.
            completions: the whole answers, the completion prefix included.
            answers: the gold answers.
            messages, prompt_ids, completion_ids, finish_reasons: chat messages, token ids, "stop" or "length".
            episodes, environment_rewards: with an environment, the model's turns and the replies, and what it gave.
            step, progress: the training step, and its share of the run's steps; no lists.
            others: the task's columns, None for a row without the column.
        """
        ...


@dataclass(frozen=True)
class TrainingState:
    """The run's progress."""

    step: int
    num_steps: int


@dataclass(frozen=True)
class Failure:
    """The reason why a function has no value for a completion, and the traceback if it raised."""

    reason: str
    details: str = ""


Outcome = float | None | Failure


class RewardError(RuntimeError):
    """A reward function failed, and `scoring.on_error` is fail, or it returned another number of values than asked."""


class CallError(Exception):
    """One call of a reward function failed; another call, on other completions, may not."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.details = details


class WrongLengthError(Exception):
    """A function that does not keep its contract, on any completions."""


def arguments_of(rollouts: Sequence[Rollout], state: TrainingState) -> dict[str, Any]:
    """The arguments of a reward function: lists with an entry for each rollout, and numbers."""
    examples = [rollout.prompt.example for rollout in rollouts]
    columns = {name for example in examples for name in example.columns}
    return {
        **{name: [example.columns.get(name) for example in examples] for name in sorted(columns)},
        "prompts": [rollout.prompt.text for rollout in rollouts],
        "completions": [rollout.answer_text for rollout in rollouts],
        "answers": [example.answer for example in examples],
        "images": [list(example.images) for example in examples],
        "messages": [[dict(message) for message in example.messages] for example in examples],
        "prompt_ids": [list(rollout.prompt.token_ids) for rollout in rollouts],
        "completion_ids": [list(rollout.completion.token_ids) for rollout in rollouts],
        "finish_reasons": [rollout.completion.finish_reason for rollout in rollouts],
        "episodes": [[dict(message) for message in rollout.completion.messages] for rollout in rollouts],
        "environment_rewards": [rollout.completion.environment_reward for rollout in rollouts],
        "step": state.step,
        "progress": state.step / state.num_steps,
    }


def call(
    function: Callable[..., Any], arguments: Arguments, wait: Callable[[Awaitable[Any]], Any]
) -> list[float | None]:
    """The function's values, checked. Numbers of any kind will do: bool, numpy, tensors of one element.

    Args: wait: gives what a coroutine returns.

    Raises: WrongLengthError; CallError with the reason for whatever the function raises or returns otherwise.
    """
    count = len(arguments["completions"])
    try:
        returned = function(**arguments)
        values = list(wait(returned) if inspect.isawaitable(returned) else returned)
    except CallError:
        raise
    except Exception as error:  # a user's function
        raise CallError(f"raised {type(error).__name__}: {error}", traceback.format_exc()) from error
    if len(values) != count:
        raise WrongLengthError(f"gave {len(values)} values for {count} completions")
    return [None if value is None else _finite(value) for value in values]


def is_coroutine(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def outcomes(name: str, calling: Callable[[Arguments], list[float | None]], arguments: Arguments) -> list[Outcome]:
    """A call's values; after one that failed, those of each completion alone, so that one does not cost the others.

    Raises: RewardError where there are more or fewer values than completions.
    """
    try:
        return list(calling(arguments))
    except WrongLengthError as error:
        raise RewardError(f"reward.{name} {error}") from error
    except CallError as error:
        count = len(arguments["completions"])
        if count == 1:
            return [Failure(str(error), error.details)]
        return [outcomes(name, calling, _row(arguments, index))[0] for index in range(count)]


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise CallError(f"gave {value!r}, expected a number or None") from error
    if not math.isfinite(number):
        raise CallError(f"gave {number}, expected a finite number, or None where it does not apply")
    return number


def _row(arguments: Arguments, index: int) -> dict[str, Any]:
    return {name: value[index : index + 1] if isinstance(value, list) else value for name, value in arguments.items()}
