"""A step's record: how long its parts took, and what its rollouts and its update tell, of all ranks together."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from rlpost import distributed
from rlpost.errors import UserError
from rlpost.record.metrics import rollout_metrics
from rlpost.record.progress import StepProgress
from rlpost.record.tracker import Tracker
from rlpost.types import Rollout


class MetricFunction(Protocol):
    """A further metric, by import path in `metrics`."""

    def __call__(self, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
        """Values by name, each reported as <its name in `metrics`>/<name>.

        Args: rollouts: every rollout of the step, of all ranks, those that a filter left out too. Per-token values are set
            where the update has computed them.
        """
        ...


class Recorder:
    """Every rank has one; the main rank's has the tracker.

    Args:
        correct: whether a rollout counts as correct, for the lengths of correct and incorrect completions.
        metrics: further functions of a step's rollouts, by name.

    Attributes: tokens: completion tokens that all ranks have sampled in the run.
    """

    def __init__(
        self,
        tracker: Tracker | None,
        progress: StepProgress,
        correct: Callable[[Rollout], bool],
        metrics: Mapping[str, MetricFunction] | None = None,
    ) -> None:
        self.tracker, self.progress, self.tokens = tracker, progress, 0
        self._correct, self._metrics = correct, dict(metrics or {})
        self._step = 0
        self._seconds: dict[str, float] = {}
        self._started = 0.0
        self._ended: float | None = None

    @property
    def mlflow_run_id(self) -> str | None:
        return self.tracker.mlflow_run_id if self.tracker else None

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step, self._started = step, time.perf_counter()
        self._seconds = {"rollout": 0.0, "reward": 0.0}
        if self._ended is not None:  # records, evaluation and checkpoint of the step before
            self._seconds["between_steps"] = self._started - self._ended

    def say(self, phase: str) -> None:
        """Show what is going on within the step."""
        self.progress.phase(self._step, phase)

    @contextmanager
    def phase(self, name: str, shown: str | None = None) -> Iterator[None]:
        """Count the time within as time/<name>. Args: shown: what a person sees meanwhile; None: what was shown before."""
        if shown is not None:
            self.say(shown)
        started = time.perf_counter()
        yield
        self.add({name: time.perf_counter() - started})

    def add(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value

    def end(self) -> None:
        """The step is whole: the engine has the new weights."""
        self._ended = time.perf_counter()
        self._seconds["step"] = self._ended - self._started

    def initial(self, evaluation: Mapping[str, float]) -> None:
        """Write down what was measured before the first step."""
        if self.tracker:
            self.tracker.log(0, evaluation, [])

    def step(self, sampled: Sequence[Rollout], trained: Sequence[Rollout], *metrics: Mapping[str, float]) -> None:
        """Write a step down. All ranks call it together.

        Args:
            sampled: this rank's rollouts, those that were left out too.
            trained: the rollouts that this rank trained on, which may have been sampled elsewhere.
            metrics: the same on every rank.
        """
        num_tokens = sum(len(r.completion.token_ids) for r in sampled)
        total = int(distributed.sum_over_ranks({"tokens": num_tokens})["tokens"])
        self.tokens += total
        everyones = [r for share in distributed.gather_to_main(list(sampled)) for r in share]
        known = distributed.gather_to_main({_key(r): _logprobs(r) for r in trained})
        if self.tracker is None:
            return
        logprobs = {key: values for share in known for key, values in share.items()}
        for r in everyones:
            values = logprobs.get(_key(r))
            r.trainer_logprobs = None if values is None else torch.from_numpy(values)
        written: dict[str, float] = {}
        update, *others = metrics
        for part in (update, rollout_metrics(everyones, self._correct), *others):
            written.update(part)
        written.update({f"time/{name}": value for name, value in self._seconds.items()})
        written["rollout/tokens_per_s"] = total / self._seconds["sampling"]
        written["rollout/staleness"] = max(self._step - 1 - r.completion.policy_version for r in everyones)
        written["tokens/total"] = self.tokens
        written["memory/rss_gb"] = psutil.Process().memory_info().rss / 1e9
        for name, metric in self._metrics.items():
            own = {f"{name}/{key}": float(value) for key, value in metric(everyones).items()}
            if taken := sorted(own.keys() & written.keys()):
                raise UserError(f"metrics.{name}: {taken[0]} is a metric already; give metrics.{name} another name")
            written.update(own)
        self.tracker.log(self._step, written, everyones)
        self.progress.step(self._step, written)

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tokens = state["tokens"]


def _key(rollout: Rollout) -> tuple[int, int]:
    return rollout.prompt.group_id, rollout.sample_index


def _logprobs(rollout: Rollout) -> np.ndarray | None:
    """A rollout's log-probabilities as they are sent: its own part of the micro-batch's tensor alone."""
    return None if rollout.trainer_logprobs is None else rollout.trainer_logprobs.numpy().copy()
