"""The files that a sweep's jobs have left, finished or not."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlpost.config.build import flat
from rlpost.record.metrics_file import MetricsFile
from rlpost.record.provenance import NOT_HASHED
from rlpost.record.rundir import RunDir
from rlpost.sweep.arms import Job, Plan

Outcome = Literal["finished", "diverged", "failed", "running", "interrupted", "not started"]
Row = Mapping[str, Any]  # a line of metrics.jsonl


@dataclass(frozen=True)
class JobResult:
    """One job as it stands.

    Attributes:
        reason: the reason of a failure, one line.
        rows: the steps trained, from 1 on; evaluations: every line with held-out figures, step 0 too.
        config: flat, `{"optimizer.lr": 1e-5}`; empty before the job has started.
    """

    job: Job
    outcome: Outcome
    reason: str | None
    rows: Sequence[Row]
    evaluations: Sequence[Row]
    config: Mapping[str, Any]
    mlflow_run_id: str | None

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def curve(self, metric: str) -> dict[int, float]:
        """step -> value, where there is one; `eval/accuracy` is whatever task's there is."""
        if metric.startswith("eval/"):
            name = metric.removeprefix("eval/")
            return {
                row["step"]: value
                for row in self.evaluations
                for key, value in row.items()
                if key.startswith("eval/") and key.endswith(f"/{name}") and value is not None
            }
        return {row["step"]: row[metric] for row in self.rows if row.get(metric) is not None}


def read_results(sweep_dir: Path, plan: Plan) -> list[JobResult]:
    return [_read(sweep_dir / job.directory, job) for job in plan.jobs]


def _read(directory: Path, job: Job) -> JobResult:
    run = RunDir(directory)
    status = run.status()
    rows = list(MetricsFile(directory / "metrics.jsonl").rows())
    return JobResult(
        job,
        _outcome(status),
        status.get("error"),
        [row for row in rows if row["step"] > 0],
        [row for row in rows if any(key.startswith("eval/") for key in row)],
        flat(run.config()) if run.has_run else {},
        status.get("mlflow_run_id"),
    )


def _outcome(status: Mapping[str, Any]) -> Outcome:
    state = status.get("state")
    if state is None:
        return "not started"
    if state == "failed" and status.get("kind") == "diverged":
        return "diverged"
    if state in ("starting", "running"):
        return "running" if _is_alive(status["pid"]) else "interrupted"
    return state


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def config_differences(results: Sequence[JobResult]) -> dict[str, dict[str, Any]]:
    """key -> arm -> value, of the settings that are not the same in all arms. An arm that has not started is left out."""
    configs = {r.job.arm: r.config for r in reversed(results) if r.config}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    compared = [key for key in keys if key.split(".")[0] not in NOT_HASHED]
    absent = "-"
    values = {key: {arm: config.get(key, absent) for arm, config in reversed(configs.items())} for key in compared}
    return {key: by_arm for key, by_arm in values.items() if len({repr(v) for v in by_arm.values()}) > 1}
