"""What a sweep consists of: named arms, each a list of overrides, over seeds; and where its jobs stand.

outputs/sweeps/<name>/<id>/sweep.json            what was planned
outputs/sweeps/<name>/<id>/<arm>/seed-<n>/       a run directory a job
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rlpost.errors import UserError
from rlpost.rundir import RunDir
from rlpost.suggest import nearest

JobState = Literal["missing", "starting", "running", "finished", "failed", "interrupted"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class SweepFailedError(Exception):
    """Some jobs of a sweep did not finish; the message names them, with their logs."""


@dataclass(frozen=True)
class Job:
    """One arm with one seed."""

    arm: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def directory(self) -> str:
        """Where its run is, under the sweep's directory."""
        return f"{self.arm}/seed-{self.seed}"


def expand(
    arms: Mapping[str, Sequence[str]], seeds: Sequence[int], baseline: str, common: Sequence[str] = ()
) -> list[Job]:
    """All jobs, seed by seed, so that an unfinished sweep has pairs to compare.

    Args: common: overrides of every job; an arm's own come after them and win.

    Raises: UserError where there is nothing to run, a seed stands there twice, a name cannot be a directory's, or the
        baseline is no arm.
    """
    if not arms or not seeds:
        raise UserError(
            "hydra.sweeper: a sweep needs at least one arm and one seed (arms: {name: [overrides]}, seeds: [0])"
        )
    if len(set(seeds)) < len(seeds):
        raise UserError(f"hydra.sweeper.seeds={list(seeds)}: a seed stands there twice")
    for name in arms:
        if not NAME.fullmatch(name):
            raise UserError(f"hydra.sweeper.arms.{name}: letters, digits, '_', '-' and '.' make an arm's name")
    if baseline not in arms:
        raise UserError(f"hydra.sweeper.baseline={baseline}: there is no such arm{nearest(baseline, arms)}")
    return [
        Job(name, seed, (*common, *overrides, f"seed={seed}")) for seed in seeds for name, overrides in arms.items()
    ]


@dataclass(frozen=True)
class Plan:
    """sweep.json."""

    name: str
    baseline: str
    jobs: tuple[Job, ...]

    def write(self, sweep_dir: Path) -> None:
        sweep_dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=2) + "\n"
        building = sweep_dir / ".sweep.json.tmp"
        building.write_text(text, encoding="utf-8")
        building.replace(sweep_dir / "sweep.json")

    @staticmethod
    def read(sweep_dir: Path) -> "Plan":
        """Raises: UserError where the directory holds no sweep."""
        file = sweep_dir / "sweep.json"
        if not file.is_file():
            raise UserError(f"{sweep_dir}: there is no sweep here (no sweep.json)")
        plan = json.loads(file.read_text(encoding="utf-8"))
        jobs = tuple(Job(job["arm"], job["seed"], tuple(job["overrides"])) for job in plan["jobs"])
        return Plan(plan["name"], plan["baseline"], jobs)


def job_state(sweep_dir: Path, job: Job) -> JobState:
    return RunDir(sweep_dir / job.directory).status().get("state", "missing")


def job_arguments(sweep_dir: Path, job: Job) -> list[str]:
    """The overrides that start a job, or go on with its run if it has one."""
    place = f"hydra.sweep.subdir={job.directory}"
    if RunDir(sweep_dir / job.directory).has_run:
        return [place, "resume=true"]
    return [place, *job.overrides]


def unfinished(sweep_dir: Path, jobs: Iterable[Job]) -> list[Job]:
    return [job for job in jobs if job_state(sweep_dir, job) != "finished"]


def summary(sweep_dir: Path, jobs: Sequence[Job]) -> list[str]:
    """A line for each job that is not finished, with its reason and its log; then the count."""
    lines = []
    for job in unfinished(sweep_dir, jobs):
        status = RunDir(sweep_dir / job.directory).status()
        reason = f": {status['error']}" if "error" in status else ""
        state = status.get("state", "missing")
        lines.append(f"{job.arm}, seed {job.seed}: {state}{reason} ({sweep_dir / job.directory / 'run.log'})")
    return [*lines, f"{len(jobs) - len(lines)} of {len(jobs)} jobs finished in {sweep_dir}"]
