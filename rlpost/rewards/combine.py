"""Several reward functions, one reward."""

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Literal

from rlpost.rewards.function import (
    Arguments,
    Failure,
    Outcome,
    RewardError,
    RewardFunction,
    TrainingState,
    arguments_of,
    call,
    outcomes,
)
from rlpost.rewards.processes import ScoringProcesses
from rlpost.types import Rollout

log = logging.getLogger(__name__)

OnError = Literal["fail", "zero", "none"]
SHOWN_CHARACTERS = 200


class RewardSum:
    """The weighted sum of the functions that apply to a rollout; NaN where none does.

    Args:
        functions: those that run in this process, once sampling is over.
        weights: of all functions.
        processes: those that run beside it; None if there are none.
        on_error: what a function that fails on a completion gives it: an end to the run, 0, or nothing.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        weights: Mapping[str, float],
        processes: ScoringProcesses | None = None,
        on_error: OnError = "fail",
    ) -> None:
        self._functions = dict(functions)
        self._weights = dict(weights)
        self._processes = processes
        self._on_error = on_error
        self._started: list[tuple[Sequence[Rollout], Arguments, Future[dict[str, list[Outcome]]] | None]] = []
        self._said: set[str] = set()

    @property
    def weights(self) -> list[float]:
        """One a function, in the order of a rollout's `rewards`."""
        return list(self._weights.values())

    def wait_until_ready(self) -> None:
        """Raises: UserError if a function that runs in a process of its own cannot be made."""
        if self._processes:
            self._processes.wait_until_ready()

    def close(self) -> None:
        if self._processes:
            self._processes.close()

    def start(self, group: Sequence[Rollout], state: TrainingState) -> None:
        """Have a whole group scored."""
        arguments = arguments_of(group, state)
        self._started.append((group, arguments, self._processes.submit(arguments) if self._processes else None))

    def finish(self) -> None:
        """Set `rewards`, `reward` and `reward_errors` of every rollout that was started.

        Raises: RewardError naming the function and the completion.
        """
        started, self._started = self._started, []
        for group, arguments, future in started:
            by_name = future.result() if future else {}
            for name, function in self._functions.items():
                by_name[name] = outcomes(name, partial(call, function), arguments)
            for name in self._weights:
                for rollout, outcome in zip(group, by_name[name], strict=True):
                    rollout.rewards[name] = self._value(name, rollout, outcome)
            for rollout in group:
                self._sum(rollout)

    def _value(self, name: str, rollout: Rollout, outcome: Outcome) -> float:
        if isinstance(outcome, Failure):
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
