"""The way from prompts to scored rollouts, and how far ahead of the trainer they are sampled."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rlpost import distributed
from rlpost.config.schema import StepConfig
from rlpost.data.stream import PromptStream
from rlpost.rewards.combine import RewardSum
from rlpost.rewards.function import TrainingState
from rlpost.rollout.engine import Engine, Sampling, sample_groups
from rlpost.rollout.filters import GroupFilter, RewardProcessor
from rlpost.types import Prompt, Rollout

log = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass
class StepBatch:
    """The rollouts of a step.

    Attributes:
        rollouts: this rank's, scored; those that a filter left out have `is_trained_on` unset.
        group_ids: the groups to train on, over all ranks.
        metrics: `sampling/*`, where there is a filter.
        seconds: `sampling` is the engine's own time, `rollout` and `reward` are what the step waited for.
    """

    rollouts: list[Rollout] = field(default_factory=list)
    group_ids: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"rollout": 0.0, "reward": 0.0, "sampling": 0.0})

    @property
    def trained_on(self) -> list[Rollout]:
        """This rank's rollouts to train on."""
        return [rollout for rollout in self.rollouts if rollout.is_trained_on]


@dataclass
class ScoredRollouts:
    """Scored rollouts of one call of the engine.

    Attributes:
        group_ids: the groups of all ranks.
        rollouts: this rank's.
        rollout_s, reward_s: seconds of the engine, and those that scoring took after it.
    """

    group_ids: list[int]
    rollouts: list[Rollout]
    rollout_s: float
    reward_s: float


class Sampler:
    """Owns the prompt stream, the engine and the rewards.

    With a staleness of k a thread samples k steps ahead while the trainer updates: step t's rollouts are from the weights
    after step max(0, t - 1 - k), exactly, so a run repeats. The engine is used by that thread alone, one call at a time, in
    the order in which calls were given; an evaluation waits for it.
    """

    def __init__(
        self,
        stream: PromptStream,
        engine: Engine,
        reward: RewardSum,
        sampling: Sampling,
        steps: StepConfig,
        *,
        max_attempts: int,
        staleness: int,
        group_filter: GroupFilter | None = None,
        reward_processing: Mapping[str, RewardProcessor] | None = None,
    ) -> None:
        """Make a sampler.

        Args:
            steps: the run's length, its seed, and how much is sampled for a step.
            max_attempts: rounds of sampling to fill a step whose groups the filter leaves out.
            staleness: steps that sampling runs ahead of the trainer.
        """
        self._stream, self._engine, self._reward = stream, engine, reward
        self.sampling, self._steps = sampling, steps
        self._max_attempts, self._staleness = max_attempts, staleness
        self._filter, self._processing = group_filter, dict(reward_processing or {})
        self._ahead: dict[int, Future[ScoredRollouts]] = {}  # by step, of those that are not whole yet
        self._drawn: dict[str, Any] = {}  # the stream's state before this step's prompts
        self._loaded: Future[None] | None = None  # the newest weights, taken over by the engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")

    def next_batch(self, step: int, say: Say = lambda phase: None) -> StepBatch:
        """Sample and score until `prompts_per_step` groups pass the filter or the attempts are used up.

        Args: say: is told what is going on.
        """
        wanted = self._steps.prompts_per_step
        self._drawn = self._stream.state_dict()
        batch = StepBatch()
        all_ids: list[int] = []
        attempts = 0
        while len(batch.group_ids) < wanted and attempts < self._max_attempts:
            attempts += 1
            say("rollout" if attempts == 1 else f"rollout, attempt {attempts}")
            started = time.perf_counter()
            sampled = self._next(step, wanted - len(batch.group_ids), say)
            waited = time.perf_counter() - started
            batch.seconds["sampling"] += sampled.rollout_s
            batch.seconds["reward"] += min(sampled.reward_s, waited)
            batch.seconds["rollout"] += max(0.0, waited - sampled.reward_s)
            all_ids += sampled.group_ids
            batch.rollouts += sampled.rollouts
            batch.group_ids += self._apply_filter(sampled.rollouts)
        if self._filter is not None:
            self._tell(step, batch, all_ids, attempts)
        return batch

    def take_back(self) -> None:
        """The step whose batch was given last is not done: it will be sampled again, or is still at hand."""
        if not self._ahead:
            self._stream.load_state_dict(self._drawn)

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], step: int) -> None:
        """Hand the engine the weights after a step, which is whole then; sampling that has begun goes on with older ones."""
        self._ahead.pop(step, None)
        if not self._staleness:
            self._engine.load_weights(named_weights, step)
            return
        # A copy: by the engine's turn the trainer may be a step further.
        weights = [(name, weight.to("cpu", copy=True)) for name, weight in named_weights]
        self._loaded = self._thread.submit(self._engine.load_weights, weights, step)

    def sample_held_out(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, step: int
    ) -> list[Rollout]:
        """Scored rollouts of held-out prompts, by the newest weights and under the same seeds each time."""
        if self._loaded is not None:
            self._loaded.result()  # what was begun before it is sampled then, too
        # Training steps count from 1: held-out samples share no seed with them.
        rollouts = self._sample(prompts, num_samples, sampling, TrainingState(step, self._steps.steps), 0)
        self._reward.finish()
        return rollouts

    def metrics(self) -> dict[str, float]:
        """The engine's own metrics since it was last asked, as rollout/<name>, summed over ranks."""
        return {f"rollout/{n}": v for n, v in distributed.sum_over_ranks(self._engine.metrics()).items()}

    @property
    def hooks(self) -> dict[str, Any]:
        """The parts that a configuration names."""
        processing = {f"reward_processing.{name}": part for name, part in self._processing.items()}
        return {"filter": self._filter, **processing, **self._reward.hooks}

    def state_dict(self) -> dict[str, Any]:
        """The stream's position and what was sampled ahead; complete on the main rank. All ranks call it together."""
        ahead = {step: sampled.result() for step, sampled in self._ahead.items()}
        return {"stream": self._stream.state_dict(), "ahead": distributed.gather_to_main(ahead)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the main rank's state of a run, also of one with another number of ranks."""
        self._stream.load_state_dict(state["stream"])
        saved: Sequence[Mapping[int, ScoredRollouts]] = state["ahead"]
        for step in sorted({step for share in saved for step in share}):
            parts = [share[step] for share in saved]
            groups: dict[int, list[Rollout]] = {}
            for rollout in (rollout for part in parts for rollout in part.rollouts):
                groups.setdefault(rollout.prompt.group_id, []).append(rollout)
            mine = [r for i in distributed.share_of(parts[0].group_ids) for r in groups[i]]
            self._ahead[step] = Future()
            self._ahead[step].set_result(replace(parts[0], rollouts=mine))

    def close(self) -> None:
        """Leave whatever is under way."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._engine.close()
        self._reward.close()

    def _next(self, step: int, num_prompts: int, say: Say) -> ScoredRollouts:
        """The step's rollouts; with a staleness those of later steps are begun too, as far as it allows."""
        if not self._staleness and step not in self._ahead:
            return self._produce(step, self._stream.draw(num_prompts), say)
        for later in range(step, min(step + self._staleness, self._steps.steps) + 1):
            if later not in self._ahead:
                prompts = self._stream.draw(self._steps.prompts_per_step)
                self._ahead[later] = self._thread.submit(
                    self._produce, later, prompts, lambda phase: None, self._loaded
                )
        return self._ahead[step].result()

    def _produce(
        self, step: int, prompts: Sequence[Prompt], say: Say, loaded: Future[None] | None = None
    ) -> ScoredRollouts:
        """Sample, score and process the rewards of this rank's share of the prompts."""
        if loaded is not None:
            loaded.result()  # the call before this one: whether it failed
        started = time.perf_counter()
        share = distributed.share_of(prompts)
        state = TrainingState(step, self._steps.steps)
        rollouts = self._sample(share, self._steps.samples_per_prompt, self.sampling, state, step)
        sampled = time.perf_counter()
        say("reward")
        self._reward.finish()
        for process in self._processing.values():
            for rollout, value in zip(rollouts, process(rollouts), strict=True):
                rollout.reward = value
        ids = [prompt.group_id for prompt in prompts]
        return ScoredRollouts(ids, rollouts, sampled - started, time.perf_counter() - sampled)

    def _sample(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, state: TrainingState, step: int
    ) -> list[Rollout]:
        """Rollouts whose groups are being scored from the moment that they are whole."""
        seed = self._steps.seed
        on_group = lambda group: self._reward.start(group, state)  # noqa: E731
        return sample_groups(self._engine, prompts, num_samples, sampling, seed, step, on_group)

    def _apply_filter(self, rollouts: list[Rollout]) -> list[int]:
        """Ask the filter about each group. Returns: the kept groups' ids over all ranks."""
        groups: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.prompt.group_id, []).append(rollout)
        for group in groups.values():
            keep = self._filter is None or self._filter(group)
            for rollout in group:
                rollout.is_trained_on = keep
        kept = [group_id for group_id, group in groups.items() if group[0].is_trained_on]
        return sorted(group_id for share in distributed.gather_all(kept) for group_id in share)

    def _tell(self, step: int, batch: StepBatch, all_ids: list[int], attempts: int) -> None:
        """Say what the filter left. A step of which nothing is left trains on everything: an update needs something."""
        wanted, found = self._steps.prompts_per_step, len(batch.group_ids)
        if found < wanted:
            log.warning(
                "step %d: %d of %d groups passed the filter within %d attempts; training on these%s",
                *(step, found, wanted, attempts, "" if found else ": on all of them, unfiltered"),
            )
        batch.metrics = {
            "sampling/attempts": attempts,
            "sampling/filtered_groups": len(all_ids) - found,
            "sampling/gave_up": float(found < wanted),
        }
        if not found:
            batch.group_ids = all_ids
            for rollout in batch.rollouts:
                rollout.is_trained_on = True
