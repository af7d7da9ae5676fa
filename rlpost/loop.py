"""The RL loop: sample, advantages, update, weights, record."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlpost.config.schema import CheckpointConfig, EvaluationConfig
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


@dataclass
class Loop:
    """Everything a run consists of.

    Attributes:
        steps: training steps of the run.
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
    steps: int
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    stop_requested: Callable[[], bool]
    hooks: Mapping[str, Stateful] = field(default_factory=dict)
    step: int = 0

    def run(self) -> dict[str, float]:
        """Train to the last step. Returns: the last evaluation.

        Raises: Interrupted after a signal, with a checkpoint of the last whole step written.
        """
        evaluation: dict[str, float] = {}
        if self.evaluation.at_start and self.step == 0:
            evaluation = self._evaluate()
            self.recorder.initial(evaluation)
        while self.step < self.steps:
            evaluation = self._one_step(self.step + 1) or evaluation
            is_last = self.step == self.steps
            if self._is_due(self.checkpoint):
                self.save()
            if not is_last and self.stop_requested():
                self._stop()
        if self.evaluation.at_end and not evaluation:
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
            self.advantages.assign(batch.trained_on)
        with record.phase("update", shown="update"):
            trained = balanced(batch.trained_on)
            metrics = self.policy.update(trained, batch.group_ids, step)
        with record.phase("sync", shown="weight sync"):
            self.sampler.load_weights(self.policy.named_weights(), step)
        record.end()
        self.step = step

        evaluation = self._evaluate() if self._is_due(self.evaluation) else {}
        record.step(batch.rollouts, trained, metrics, batch.metrics, evaluation, self.sampler.metrics())
        return evaluation

    def _is_due(self, settings: EvaluationConfig | CheckpointConfig) -> bool:
        """True if an evaluation or a checkpoint with these settings follows this step."""
        is_last = self.step == self.steps
        return (settings.every > 0 and self.step % settings.every == 0) or (is_last and settings.at_end)

    def _evaluate(self) -> dict[str, float]:
        if self.evaluator is None:
            return {}
        with self.recorder.phase("evaluation", shown="evaluation"):
            return self.evaluator(self.step)

    def _stop(self) -> None:
        self.save()
        self.checkpoints.finish()
        raise Interrupted

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Everything but the policy that the next step depends on."""
        return {"sampler": self.sampler, "recorder": self.recorder, **self.hooks}

    def save(self) -> None:
        """Begin a checkpoint of the last whole step."""
        about = {"mlflow_run_id": self.recorder.mlflow_run_id}
        self.checkpoints.save(self.policy, self.step, about, {n: p.state_dict() for n, p in self.stateful.items()})

    def restore(self, step: int, saved: Mapping[str, Mapping[str, object]]) -> None:
        """Go on after a step, whose policy is loaded already."""
        self.step = step
        for name, part in self.stateful.items():
            part.load_state_dict(saved[name])
        self.sampler.load_weights(self.policy.named_weights(), step)
