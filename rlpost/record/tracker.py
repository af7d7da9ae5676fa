"""A run's record: metrics.jsonl and completion files always, MLflow when there is a URI."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.config.schema import TrackingConfig
from rlpost.record import completions
from rlpost.record.metrics_file import MetricsFile
from rlpost.record.mlflow_sink import MlflowSink
from rlpost.record.mlflow_store import Status
from rlpost.types import Rollout

log = logging.getLogger(__name__)


class Tracker:
    """A run's record: files in its directory, and an MLflow run if there is a sink.

    Only the main rank has one.
    """

    def __init__(self, run_dir: Path, sink: MlflowSink | None, tracking: TrackingConfig) -> None:
        self._metrics = MetricsFile(run_dir / "metrics.jsonl")
        self._run_dir = run_dir
        self._sink = sink
        self._completions_every = tracking.completions_every
        self._traces = tracking.traces
        self._named: set[str] = set()  # metrics already reported as not finite

    @property
    def mlflow_run_id(self) -> str | None:
        return self._sink.run_id if self._sink else None

    def resume_after(self, step: int) -> None:
        """Go on after a checkpoint's step: later lines are dropped, and MLflow gets what it lacks of the others."""
        self._metrics.keep_until(step)
        if self._sink:
            for row in self._metrics.rows():
                self._sink.metrics(row.pop("step"), row)

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout]) -> None:
        """Record a step; step 0 is what was measured before the first, without rollouts."""
        for name, value in metrics.items():
            if not math.isfinite(value) and name not in self._named:
                self._named.add(name)
                log.info("%s is %s at step %d; written as null (said once)", name, value, step)
        written = self._metrics.append(step, metrics)
        if self._sink:
            self._sink.metrics(step, written)
        if rollouts:
            self._log_completions(step, rollouts)

    def _log_completions(self, step: int, rollouts: Sequence[Rollout]) -> None:
        completions.write_table(completions.completions_table(rollouts, step), self._run_dir, step)
        if self._sink and self._completions_every and (step == 1 or step % self._completions_every == 0):
            if self._traces:
                self._sink.traces(step, rollouts[:: max(1, len(rollouts) // self._traces)][: self._traces])
            self._sink.table(step, completions.table_for_people(rollouts, step))

    def summary(self) -> list[dict[str, Any]]:
        return list(self._metrics.rows())

    def close(self, status: Status, files: Sequence[Path] = ()) -> None:
        """Send what is left and end the MLflow run. A gap that stays is named in the log."""
        if self._sink:
            for file in files:
                self._sink.file(file)
            self._sink.close(status)
