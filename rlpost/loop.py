"""The RL loop: sample, advantages, update, weights, record."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlpost.distributed import balanced
from rlpost.evaluate import Evaluator
from rlpost.record.recorder import Recorder
from rlpost.rollout.sampler import Sampler
from rlpost.trainer.advantages import StepAdvantages
from rlpost.trainer.checkpoint import Checkpoints
from rlpost.trainer.policy import Policy
from rlpost.types import Stateful


class Interrupted(Exception):  # noqa: N818 - a request to stop, not an error
    """A signal asked the run to stop; its last whole step is in a checkpoint."""


@dataclass(frozen=True)
class LoopSettings:
    """How long the loop goes on, and what it does when.

    Attributes: eval_every, checkpoint_every: steps between them, 0 for never (but for the ends).
    """

    steps: int
    eval_every: int = 0
    eval_at_start: bool = False
    eval_at_end: bool = True
    checkpoint_every: int = 10
    checkpoint_at_end: bool = True


@dataclass
class Loop:
    """Everything a run consists of.

    Attributes:
        stop_requested: whether the run was asked to stop, on any rank.
        hooks: the parts of the algorithm that have a state, by name; checkpoints hold it.
        step: the last whole step.
    """

    sampler: Sampler
    advantages: StepAdvantages
    policy: Policy
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    recorder: Recorder
    settings: LoopSettings
    stop_requested: Callable[[], bool]
    hooks: Mapping[str, Stateful] = field(default_factory=dict)
    step: int = 0

    def run(self) -> dict[str, float]:
        """Train to the last step. Returns: the last evaluation.

        Raises: Interrupted after a signal, with a checkpoint of the last whole step written.
        """
        s = self.settings
        evaluation: dict[str, float] = {}
        if s.eval_at_start and self.step == 0:
            evaluation = self._evaluate()
            self.recorder.initial(evaluation)
        while self.step < s.steps:
            evaluation = self._one_step(self.step + 1) or evaluation
            last = self.step == s.steps
            if (s.checkpoint_every and self.step % s.checkpoint_every == 0) or (last and s.checkpoint_at_end):
                self.save()
            if not last and self.stop_requested():
                self._stop()
        if s.eval_at_end and not evaluation:
            evaluation = self._evaluate()
        self.checkpoints.finish()
        return evaluation

    def _one_step(self, step: int) -> dict[str, float]:
        record = self.recorder
        record.begin(step)
        batch = self.sampler.next_batch(step, record.say)
        record.add(batch.seconds)
        if self.stop_requested():  # nothing has changed yet: this step can be done again
            self.sampler.take_back()
            self._stop()
        with record.phase("reward"):
            self.advantages.assign(batch.kept)
        with record.phase("update", shown="update"):
            trained = balanced(batch.kept)
            metrics = self.policy.update(trained, batch.group_ids, step)
        with record.phase("sync", shown="weight sync"):
            self.sampler.load_weights(self.policy.named_weights(), step)
        record.end()
        self.step = step

        s = self.settings
        due = (s.eval_every and step % s.eval_every == 0) or (s.eval_at_end and step == s.steps)
        evaluation = self._evaluate() if due else {}
        engine = {f"rollout/{name}": value for name, value in self.sampler.metrics().items()}
        record.step(batch.rollouts, trained, metrics, batch.metrics, evaluation, engine)
        return evaluation

    def _evaluate(self) -> dict[str, float]:
        if self.evaluator is None:
            return {}
        with self.recorder.phase("evaluation", shown="evaluation"):
            return self.evaluator(self.step)

    def _stop(self) -> None:
        self.save()
        self.checkpoints.finish()
        raise Interrupted

    def save(self) -> None:
        """Begin a checkpoint of the last whole step."""
        tracker = self.recorder.tracker
        about = {"mlflow_run_id": tracker.mlflow_run_id if tracker else None}
        self.checkpoints.save(self.policy, self.step, about, {n: p.state_dict() for n, p in self.stateful.items()})

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Everything but the policy that the next step depends on."""
        return {"sampler": self.sampler, "recorder": self.recorder, **self.hooks}

    def restore(self, step: int, saved: Mapping[str, Mapping[str, object]]) -> None:
        """Go on after a step, whose policy is loaded already."""
        self.step = step
        for name, part in self.stateful.items():
            part.load_state_dict(saved[name])
        self.sampler.load_weights(self.policy.named_weights(), step)

    def close(self) -> None:
        """Leave whatever is under way."""
        self.sampler.close()
