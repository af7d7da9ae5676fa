"""The RL loop, on one screen."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import psutil
import torch

from rlpost import distributed
from rlpost.data.stream import PromptStream
from rlpost.evaluate import Correctness, Evaluator
from rlpost.objective.advantages import Advantage, Stateful, normalize_then_sum
from rlpost.record.metrics import rollout_metrics
from rlpost.record.progress import StepProgress
from rlpost.record.tracker import Tracker
from rlpost.rewards.combine import RewardSum
from rlpost.rewards.function import TrainingState
from rlpost.rollout.engine import Engine, Sampling, sample_groups
from rlpost.rollout.filters import GroupFilter, RewardProcessor
from rlpost.trainer.checkpoint import Checkpoints
from rlpost.trainer.policy import Policy
from rlpost.types import Prompt, Rollout

log = logging.getLogger(__name__)


class Interrupted(Exception):  # noqa: N818 - a request to stop, not an error
    """A signal asked the run to stop; its last whole step is in a checkpoint."""


@dataclass(frozen=True)
class LoopSettings:
    """What the loop does when.

    Attributes:
        max_attempts: rounds of sampling to fill a step whose groups a filter leaves out.
        kl_in_reward: weight of the sequence's k1 estimate, taken off its reward; 0 is off.
        normalize_each_reward: advantages of each reward function, summed, instead of those of the summed reward.
        eval_every, checkpoint_every: steps between them, 0 for never (but for the ends).
        staleness: steps that sampling runs ahead.
    """

    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    seed: int
    max_attempts: int = 1
    kl_in_reward: float = 0.0
    normalize_each_reward: bool = False
    eval_every: int = 0
    eval_at_start: bool = False
    eval_at_end: bool = True
    checkpoint_every: int = 10
    checkpoint_at_end: bool = True
    staleness: int = 0


@dataclass
class Sampled:
    """Scored rollouts of one call of the engine, and what it took.

    Attributes:
        group_ids: of all ranks.
        rollouts: this rank's.
        rollout_s, reward_s: the engine's seconds, and those that scoring took after it.
    """

    group_ids: list[int]
    rollouts: list[Rollout]
    rollout_s: float
    reward_s: float


@dataclass
class Loop:
    """Everything a run consists of. `step` is the last whole step, `tokens` what has been sampled until then.

    With a staleness of k a thread samples k steps ahead while the trainer updates: step t's rollouts are from the weights
    after step max(0, t - 1 - k), exactly, so a run repeats. The engine is used by that thread alone, one call at a time, in
    the order in which calls were given; an evaluation waits for it.
    """

    stream: PromptStream
    engine: Engine
    reward: RewardSum
    advantage: Advantage
    policy: Policy
    evaluator: Evaluator
    correct: Correctness
    sampling: Sampling
    checkpoints: Checkpoints
    settings: LoopSettings
    tracker: Tracker | None  # on the main rank
    stop_requested: Callable[[], bool]
    group_filter: GroupFilter | None = None
    reward_processing: Sequence[RewardProcessor] = ()
    step: int = 0
    tokens: int = 0
    ahead: dict[int, Future[Sampled]] = field(default_factory=dict)  # of steps that are not whole yet
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="rollout"))
    _loaded: Future[None] | None = None  # the newest weights, taken over by the engine
    _step_ended: float | None = None

    def run(self, progress: StepProgress) -> dict[str, float]:
        """Train to the last step. Returns: the last evaluation.

        Raises: Interrupted after a signal, with a checkpoint of the last whole step written.
        """
        s = self.settings
        evaluation: dict[str, float] = {}
        if s.eval_at_start and self.step == 0:
            progress.phase(0, "evaluation")
            evaluation = self._evaluate()
            if self.tracker:
                self.tracker.log(0, evaluation, [])
        while self.step < s.steps:
            evaluation = self._one_step(self.step + 1, progress) or evaluation
            last = self.step == s.steps
            if (s.checkpoint_every and self.step % s.checkpoint_every == 0) or (last and s.checkpoint_at_end):
                self.save()
            if not last:
                self._stop_if_asked()
        if s.eval_at_end and not evaluation:
            evaluation = self._evaluate()
        self.checkpoints.finish()
        return evaluation

    def _one_step(self, step: int, progress: StepProgress) -> dict[str, float]:
        s = self.settings
        seconds = {"rollout": 0.0, "reward": 0.0}
        drawn = self.stream.state_dict()
        started = time.perf_counter()
        if self._step_ended is not None:  # records, evaluation and checkpoint of the step before
            seconds["between_steps"] = started - self._step_ended
        sampled, group_ids, sampling_metrics = self._sample(step, seconds, progress)
        rollouts = [rollout for rollout in sampled if rollout.kept]
        if distributed.any_rank(self.stop_requested()):  # nothing has changed yet: this step can be done again
            if not self.ahead:
                self.stream.load_state_dict(drawn)
            self._stop_if_asked()
        with _timed(seconds, "reward"):
            self._set_advantages(rollouts)
        with _timed(seconds, "update"):
            progress.phase(step, "update")
            trained = distributed.balanced(rollouts)
            metrics = self.policy.update(trained, group_ids, step)
        with _timed(seconds, "sync"):
            progress.phase(step, "weight sync")
            self._load_weights(step)

        self._step_ended = time.perf_counter()
        seconds["step"] = self._step_ended - started
        num_tokens = sum(len(r.completion.token_ids) for r in sampled)
        total = int(distributed.sum_over_ranks({"tokens": num_tokens})["tokens"])
        self.step, self.tokens = step, self.tokens + total
        self.ahead.pop(step, None)
        due = (s.eval_every and step % s.eval_every == 0) or (s.eval_at_end and step == s.steps)
        evaluation: dict[str, float] = {}
        if due:
            with _timed(seconds, "evaluation"):
                progress.phase(step, "evaluation")
                evaluation = self._evaluate()
        engine_metrics = distributed.sum_over_ranks(self.engine.metrics())
        everyones = [r for share in distributed.gather_to_main(sampled) for r in share]
        # They may have been trained on elsewhere than they were sampled.
        known = distributed.gather_to_main({(r.prompt.group_id, r.sample_index): r.trainer_logprobs for r in trained})
        if self.tracker:
            logprobs = {place: values for share in known for place, values in share.items()}
            for r in everyones:
                r.trainer_logprobs = logprobs.get((r.prompt.group_id, r.sample_index), ())
            metrics.update(rollout_metrics(everyones, self.correct))
            metrics.update(sampling_metrics)
            metrics.update(evaluation)
            metrics.update({f"time/{name}": value for name, value in seconds.items()})
            metrics["rollout/tokens_per_s"] = total / seconds["sampling"]
            metrics["rollout/staleness"] = max(step - 1 - r.completion.policy_version for r in everyones)
            metrics.update({f"rollout/{name}": value for name, value in engine_metrics.items()})
            metrics["tokens/total"] = self.tokens
            metrics["memory/rss_gb"] = psutil.Process().memory_info().rss / 1e9
            self.tracker.log(step, metrics, everyones)
            progress.step(step, metrics)
        return evaluation

    def _sample(
        self, step: int, seconds: dict[str, float], progress: StepProgress
    ) -> tuple[list[Rollout], list[int], dict[str, float]]:
        """Rollouts with rewards, until `prompts_per_step` groups pass the filter or the attempts are used up.

        Returns: this rank's rollouts, those to train on marked as kept; the kept groups of all ranks; metrics.
        """
        s = self.settings
        sampled: list[Rollout] = []
        kept_ids: list[int] = []
        all_ids: list[int] = []
        attempts = 0
        while len(kept_ids) < s.prompts_per_step and attempts < s.max_attempts:
            attempts += 1
            progress.phase(step, "rollout" if attempts == 1 else f"rollout, attempt {attempts}")
            started = time.perf_counter()
            batch = self._next_rollouts(step, s.prompts_per_step - len(kept_ids), progress)
            waited = time.perf_counter() - started
            _add(seconds, "sampling", batch.rollout_s)
            _add(seconds, "reward", min(batch.reward_s, waited))
            _add(seconds, "rollout", max(0.0, waited - batch.reward_s))
            all_ids += batch.group_ids
            with _timed(seconds, "reward"):
                for process in self.reward_processing:
                    for rollout, value in zip(batch.rollouts, process(batch.rollouts), strict=True):
                        rollout.reward = value
                sampled += batch.rollouts
                kept_ids += self._filter(batch.rollouts)
        if self.group_filter is None:
            return sampled, kept_ids, {}
        missing = s.prompts_per_step - len(kept_ids)
        if missing:
            log.warning(
                "step %d: %d of %d groups passed the filter within %d attempts; training on these%s",
                *(
                    step,
                    len(kept_ids),
                    s.prompts_per_step,
                    attempts,
                    "" if kept_ids else ": on all of them, unfiltered",
                ),
            )
        metrics = {
            "sampling/attempts": attempts,
            "sampling/filtered_groups": len(all_ids) - len(kept_ids),
            "sampling/gave_up": float(missing > 0),
        }
        if not kept_ids:  # an update needs something to update on
            for rollout in sampled:
                rollout.kept = True
            kept_ids = all_ids
        return sampled, kept_ids, metrics

    def _next_rollouts(self, step: int, num_prompts: int, progress: StepProgress) -> Sampled:
        """Those of the step; with a staleness those of later steps are begun too, as far as it allows."""
        s = self.settings
        if not s.staleness and step not in self.ahead:
            return self._rollouts(step, self.stream.draw(num_prompts), progress)
        for later in range(step, min(step + s.staleness, s.steps) + 1):
            if later not in self.ahead:
                prompts = self.stream.draw(s.prompts_per_step)
                self.ahead[later] = self._thread.submit(self._rollouts, later, prompts, None, self._loaded)
        return self.ahead[step].result()

    def _rollouts(
        self, step: int, prompts: Sequence[Prompt], progress: StepProgress | None, loaded: Future[None] | None = None
    ) -> Sampled:
        s = self.settings
        if loaded is not None:
            loaded.result()  # the call before this one: whether it failed
        started = time.perf_counter()
        rollouts = sample_groups(
            self.engine,
            distributed.share_of(prompts),
            s.samples_per_prompt,
            self.sampling,
            s.seed,
            step,
            on_group=lambda group: self.reward.start(group, self._state(step)),
        )
        sampled = time.perf_counter()
        if progress is not None:
            progress.phase(step, "reward")
        self.reward.finish()
        ids = [prompt.group_id for prompt in prompts]
        return Sampled(ids, rollouts, sampled - started, time.perf_counter() - sampled)

    def _load_weights(self, step: int) -> None:
        if not self.settings.staleness:
            self.engine.load_weights(self.policy.named_weights(), step)
            return
        # A copy: by the engine's turn the trainer may be a step further.
        weights = [(name, weight.to("cpu", copy=True)) for name, weight in self.policy.named_weights()]
        self._loaded = self._thread.submit(self.engine.load_weights, weights, step)

    def _evaluate(self) -> dict[str, float]:
        """By the newest weights, once what was begun before is sampled."""
        if self._loaded is not None:
            self._loaded.result()
        return self.evaluator(self._state(self.step))

    def _filter(self, rollouts: list[Rollout]) -> list[int]:
        """Mark each group as kept or not. Returns: the kept groups' ids over all ranks."""
        groups: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.prompt.group_id, []).append(rollout)
        for group in groups.values():
            keep = self.group_filter is None or self.group_filter(group)
            for rollout in group:
                rollout.kept = keep
        kept = [group_id for group_id, group in groups.items() if group[0].kept]
        return sorted(group_id for share in distributed.gather_all(kept) for group_id in share)

    def _set_advantages(self, rollouts: list[Rollout]) -> None:
        """Advantages see the whole step: every rank computes all of them and takes its own."""
        s = self.settings
        if s.kl_in_reward:
            for rollout, kl in zip(rollouts, self.policy.sequence_kl(rollouts), strict=True):
                rollout.reward -= s.kl_in_reward * kl
        mine = [(r.prompt.group_id, r.reward, list(r.rewards.values())) for r in rollouts]
        shares = distributed.gather_all(mine)
        everyones = [row for share in shares for row in share]
        group_ids = torch.tensor([group_id for group_id, _, _ in everyones])
        if s.normalize_each_reward:
            rewards = torch.tensor([each for _, _, each in everyones], dtype=torch.float64)
            advantages = normalize_then_sum(self.advantage, rewards, self.reward.weights, group_ids)
        else:
            total = torch.tensor([reward for _, reward, _ in everyones], dtype=torch.float64)
            advantages = self.advantage(total, group_ids)
        first = sum(len(share) for share in shares[: distributed.rank()])
        for rollout, value in zip(rollouts, advantages[first : first + len(mine)].tolist(), strict=True):
            rollout.advantage = value

    def _state(self, step: int) -> TrainingState:
        return TrainingState(step, self.settings.steps)

    def _stop_if_asked(self) -> None:
        if distributed.any_rank(self.stop_requested()):
            self.save()
            self.checkpoints.finish()
            raise Interrupted

    def save(self) -> None:
        run_id = self.tracker.mlflow_run_id if self.tracker else None
        state = {"stream": self.stream.state_dict(), "tokens": self.tokens, "mlflow_run_id": run_id}
        if isinstance(self.advantage, Stateful):
            state["advantage"] = self.advantage.state_dict()
        ahead = {step: sampled.result() for step, sampled in self.ahead.items()}
        self.checkpoints.save(self.policy, self.step, state, distributed.gather_to_main(ahead) if ahead else [])

    def close(self) -> None:
        """Whatever is under way is left."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.engine.close()
        self.reward.close()

    def restore_ahead(self, saved: Sequence[dict[int, Sampled]]) -> None:
        """What a checkpoint holds of later steps, each rank's; dealt out anew, also over another number of ranks."""
        for step in sorted({step for share in saved for step in share}):
            parts = [share[step] for share in saved]
            groups: dict[int, list[Rollout]] = {}
            for rollout in (rollout for part in parts for rollout in part.rollouts):
                groups.setdefault(rollout.prompt.group_id, []).append(rollout)
            mine = [r for i in distributed.share_of(parts[0].group_ids) for r in groups[i]]
            self.ahead[step] = Future()
            self.ahead[step].set_result(replace(parts[0], rollouts=mine))


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    _add(seconds, name, time.perf_counter() - started)


def _add(seconds: dict[str, float], name: str, value: float) -> None:
    seconds[name] = seconds.get(name, 0.0) + value
