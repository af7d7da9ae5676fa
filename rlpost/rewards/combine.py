"""Several reward functions, one reward."""

import logging
import math
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlpost.config.schema import ScoringConfig
from rlpost.rewards.coroutines import Coroutines
from rlpost.rewards.function import (
    Arguments,
    Failure,
    Outcome,
    RewardError,
    RewardFunction,
    TrainingState,
    arguments_of,
    call,
    is_coroutine,
    outcomes,
)
from rlpost.rewards.processes import ScoringProcesses
from rlpost.types import Rollout

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 200


@dataclass
class _Started:
    """A group whose scores are on their way."""

    group: Sequence[Rollout]
    arguments: Arguments
    names: set[str]  # the functions that apply
    beside: Future[dict[str, list[Outcome]]] | None = None
    waiting: dict[str, Future[list[Outcome]]] = field(default_factory=dict)


class RewardSum:
    """The weighted sum of the functions that apply to a rollout; NaN where none does.

    Args:
        functions: the functions that run in this process: coroutines while sampling goes on, the others once it is over.
        weights: the weights of all functions.
        processes: the processes that run the other functions; None if there are none.
        scoring: how long a coroutine may take, and what a function that fails on a completion gives it; None: the defaults.
        only: the tasks a function applies to, for those that do not apply to all.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        weights: Mapping[str, float],
        processes: ScoringProcesses | None = None,
        scoring: ScoringConfig | None = None,
        only: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        scoring = scoring or ScoringConfig()
        self._plain = {name: function for name, function in functions.items() if not is_coroutine(function)}
        self._waiting = {name: function for name, function in functions.items() if name not in self._plain}
        self._coroutines = Coroutines(scoring.timeout) if self._waiting else None
        self._weights = dict(weights)
        self._processes = processes
        self._on_error = scoring.on_error
        self._only = dict(only or {})
        self._started: list[_Started] = []
        self._said: set[str] = set()

    @property
    def hooks(self) -> dict[str, RewardFunction]:
        """The functions that run in this process, under the names of their settings."""
        return {f"reward.{name}": function for name, function in {**self._plain, **self._waiting}.items()}

    def wait_until_ready(self) -> None:
        """Raises: UserError if a function that runs in a process of its own cannot be made."""
        if self._processes:
            self._processes.wait_until_ready()

    def close(self) -> None:
        for helpers in (self._processes, self._coroutines):
            if helpers:
                helpers.close()

    def start(self, group: Sequence[Rollout], state: TrainingState) -> None:
        """Have a whole group scored."""
        arguments = arguments_of(group, state)
        task = group[0].prompt.example.task
        started = _Started(group, arguments, {n for n in self._weights if n not in self._only or task in self._only[n]})
        if self._processes and (names := [n for n in self._processes.names if n in started.names]):
            started.beside = self._processes.submit(names, arguments)
        if self._coroutines:
            started.waiting = {
                name: self._coroutines.submit(name, function, arguments)
                for name, function in self._waiting.items()
                if name in started.names
            }
        self._started.append(started)

    def finish(self) -> None:
        """Set `rewards`, `reward` and `reward_errors` of every rollout that was started.

        Raises: RewardError naming the function and the completion.
        """
        started, self._started = self._started, []
        for one in started:
            by_name = one.beside.result() if one.beside else {}
            by_name |= {name: future.result() for name, future in one.waiting.items()}
            for name in self._plain.keys() & one.names:
                by_name[name] = outcomes(name, partial(call, self._plain[name], wait=_never), one.arguments)
            for name in self._weights:
                for rollout, outcome in zip(one.group, by_name.get(name, [None] * len(one.group)), strict=True):
                    rollout.rewards[name] = self._value(name, rollout, outcome)
            for rollout in one.group:
                self._sum(rollout)

    def _value(self, name: str, rollout: Rollout, outcome: Outcome) -> float:
        if isinstance(outcome, Failure):
            if name not in self._said:
                logging.getLogger("rlpost.trace").debug("reward.%s: %s", name, outcome.details)
            where = f"reward.{name} {outcome.reason}, for {_shown(rollout)}"
            if self._on_error == "fail":
                raise RewardError(f"{where}; scoring.on_error=zero or none would go on")
            self._say_once(name, f"{where}; it counts as {self._on_error} (said once)")
            rollout.reward_errors[name] = outcome.reason
            return 0.0 if self._on_error == "zero" else math.nan
        return math.nan if outcome is None else outcome

    def _sum(self, rollout: Rollout) -> None:
        parts = [self._weights[name] * value for name, value in rollout.rewards.items() if not math.isnan(value)]
        rollout.reward = math.fsum(parts) if parts else math.nan
        if not parts:
            self._say_once(
                "", f"no reward function applies to {_shown(rollout)}; it is left out of its group (said once)"
            )

    def _say_once(self, about: str, message: str) -> None:
        if about not in self._said:
            self._said.add(about)
            log.warning("%s", message)


def _never(coming: Awaitable[Any]) -> Any:
    raise TypeError("a plain function gave an awaitable; write it as a coroutine function (async def)")


def _shown(rollout: Rollout) -> str:
    """One line that finds a rollout."""
    example = rollout.prompt.example
    asked = example.messages[-1]["content"] if example.messages else rollout.prompt.text
    return (
        f"completion {_short(rollout.answer_text)} (group {rollout.prompt.group_id}, sample {rollout.sample_index}) of "
        f"prompt {_short(asked)}, answer {_short(example.answer)}"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
