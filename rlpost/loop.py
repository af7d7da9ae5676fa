"""The RL loop, on one screen."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from rlpost.data.stream import PromptStream
from rlpost.evaluate import Correctness, Evaluator
from rlpost.metrics import rollout_metrics
from rlpost.objective.advantages import Advantage
from rlpost.progress import StepProgress
from rlpost.rewards.combine import RewardSum
from rlpost.rollout.engine import Engine, Sampling, sample_groups
from rlpost.tracking import Tracker
from rlpost.trainer import distributed
from rlpost.trainer.checkpoint import Checkpoints
from rlpost.trainer.policy import Policy
from rlpost.types import Rollout


class Interrupted(Exception):  # noqa: N818 - a request to stop, not an error
    """A signal asked the run to stop; its last whole step is in a checkpoint."""


@dataclass(frozen=True)
class LoopSettings:
    """Attributes: eval_every, checkpoint_every: steps between them, 0 for never (but for the ends)."""

    steps: int
    samples_per_prompt: int
    seed: int
    eval_every: int = 0
    eval_at_start: bool = False
    eval_at_end: bool = True
    checkpoint_every: int = 10
    checkpoint_at_end: bool = True


@dataclass
class Loop:
    """Everything a run consists of. `step` is the last whole step, `tokens` what has been sampled until then."""

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
    step: int = 0
    tokens: int = 0

    def run(self, progress: StepProgress) -> dict[str, float]:
        """Train to the last step. Returns: the last evaluation.

        Raises: Interrupted after a signal, with a checkpoint of the last whole step written.
        """
        s = self.settings
        evaluation: dict[str, float] = {}
        if s.eval_at_start and self.step == 0:
            progress.phase(0, "evaluation")
            evaluation = self.evaluator()
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
            evaluation = self.evaluator()
        return evaluation

    def _one_step(self, step: int, progress: StepProgress) -> dict[str, float]:
        s = self.settings
        seconds: dict[str, float] = {}
        drawn = self.stream.state_dict()
        started = time.perf_counter()
        with _timed(seconds, "rollout"):
            progress.phase(step, "rollout")
            prompts = self.stream.next_step()
            mine = distributed.share_of(prompts)
            rollouts = sample_groups(self.engine, mine, s.samples_per_prompt, self.sampling, s.seed, step)
        with _timed(seconds, "reward"):
            progress.phase(step, "reward")
            self.reward.score(rollouts)
            self._set_advantages(rollouts)
        if distributed.any_rank(self.stop_requested()):  # nothing has changed yet: this step can be done again
            self.stream.load_state_dict(drawn)
            self._stop_if_asked()
        with _timed(seconds, "update"):
            progress.phase(step, "update")
            metrics = self.policy.update(rollouts, [prompt.group_id for prompt in prompts], step)
        with _timed(seconds, "sync"):
            progress.phase(step, "weight sync")
            self.engine.load_weights(self.policy.named_weights())

        seconds["step"] = time.perf_counter() - started
        num_tokens = sum(len(r.completion.token_ids) for r in rollouts)
        total = int(distributed.sum_over_ranks({"tokens": num_tokens})["tokens"])
        self.step, self.tokens = step, self.tokens + total
        due = (s.eval_every and step % s.eval_every == 0) or (s.eval_at_end and step == s.steps)
        evaluation: dict[str, float] = {}
        if due:
            with _timed(seconds, "evaluation"):
                progress.phase(step, "evaluation")
                evaluation = self.evaluator()
        everyones = [r for share in distributed.gather_to_main(rollouts) for r in share]
        if self.tracker:
            metrics.update(rollout_metrics(everyones, self.correct))
            metrics.update(evaluation)
            metrics.update({f"time/{name}": value for name, value in seconds.items()})
            metrics["rollout/tokens_per_s"] = total / seconds["rollout"]
            metrics["rollout/staleness"] = 0
            metrics["tokens/total"] = self.tokens
            metrics["memory/rss_gb"] = psutil.Process().memory_info().rss / 1e9
            self.tracker.log(step, metrics, everyones)
            progress.step(step, metrics)
        return evaluation

    def _set_advantages(self, rollouts: list[Rollout]) -> None:
        """A group's samples are all on one rank, so its advantages need no other."""
        rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float64)
        group_ids = torch.tensor([r.prompt.group_id for r in rollouts])
        for rollout, value in zip(rollouts, self.advantage(rewards, group_ids).tolist(), strict=True):
            rollout.advantage = value

    def _stop_if_asked(self) -> None:
        if distributed.any_rank(self.stop_requested()):
            self.save()
            raise Interrupted

    def save(self) -> None:
        run_id = self.tracker.mlflow_run_id if self.tracker else None
        state = {"stream": self.stream.state_dict(), "tokens": self.tokens, "mlflow_run_id": run_id}
        self.checkpoints.save(self.policy, self.step, state)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
