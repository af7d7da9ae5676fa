"""The parts of a sweep: arms, each a list of overrides, over seeds; and the state of its jobs.

outputs/sweeps/<name>/<id>/sweep.json            what was planned
outputs/sweeps/<name>/<id>/<arm>/seed-<n>/       a run directory a job (<number>/ where arms have no names)
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from rlpost.errors import UserError, nearest
from rlpost.record.rundir import RunDir

JobState = Literal["missing", "starting", "running", "finished", "failed", "interrupted"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class SweepFailedError(Exception):
    """Some jobs of a sweep did not finish; the message names them, with their logs."""


@dataclass(frozen=True)
class Job:
    """One arm with one seed. Its run is in `directory`, under the sweep's.

    Attributes: config_hash: the hash of the configuration that was validated, so that a resume runs no other.
    """

    arm: str
    seed: int
    overrides: tuple[str, ...]
    directory: str
    config_hash: str = ""


def named_arms(arms: Mapping[str, Sequence[str]], seeds: Sequence[int], arguments: Sequence[str] = ()) -> list[Job]:
    """The jobs of a sweep file, seed by seed, so that an unfinished sweep has pairs to compare.

    Args: arguments: the command line's overrides, for every job; an arm's own come after them and win.

    Raises: UserError where there is no seed, a seed stands there twice, a name cannot be a directory's, or the command
        line has choices or a seed of its own.
    """
    if not seeds:
        raise UserError("sweep.seeds=[]: a sweep of named arms needs at least one seed: sweep.seeds=[0,1,2]")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"sweep.seeds={list(seeds)}: a seed stands there twice")
    for name in arms:
        if not NAME.fullmatch(name):
            raise UserError(f"sweep.arms.{name}: letters, digits, '_', '-' and '.' make an arm's name")
    common = []
    for override in OverridesParser.create().parse_overrides(list(arguments)):
        if override.key_or_group == "seed":
            raise UserError(f"{override.input_line}: the seeds of this sweep are sweep.seeds={list(seeds)}")
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: this sweep has named arms; add one with +sweep.arms.NAME=[...]")
        if not str(override.key_or_group).startswith("sweep."):
            common.append(str(override.input_line))
    return [
        Job(name, seed, (*common, *overrides, f"seed={seed}"), f"{name}/seed-{seed}")
        for seed in seeds
        for name, overrides in arms.items()
    ]


def choices(arguments: Sequence[str], loader: ConfigLoader | None, name: str, seed: int) -> list[Job]:
    """The jobs of a plain multirun: every combination of the command line's choices, ranges and globs.

    An arm is what a combination sets besides the seed.

    Args:
        loader: knows the groups that a glob picks from.
        name: the name of the only arm, where nothing but the seed varies.
        seed: the seed of every job, where it does not vary.

    Raises: UserError where an override is a continuous interval, which only a search can use.
    """
    fixed: list[str] = []
    varied: list[list[tuple[Override, str]]] = []
    for override in OverridesParser.create(config_loader=loader).parse_overrides(list(arguments)):
        if not override.is_sweep_override():
            if override.key_or_group == "seed":
                seed = int(str(override.value()))
            if not str(override.key_or_group).startswith("sweep."):
                fixed.append(str(override.input_line))
        elif override.is_discrete_sweep():
            key = override.get_key_element()
            varied.append([(override, f"{key}={value}") for value in override.sweep_string_iterator()])
        else:
            raise UserError(f"{override.input_line}: an interval is for a search: hydra/sweeper=optuna")
    jobs = []
    for number, combination in enumerate(itertools.product(*varied)):
        own = [text for override, text in combination if override.key_or_group != "seed"]
        seeds = [int(text.split("=", 1)[1]) for override, text in combination if override.key_or_group == "seed"]
        arm = ", ".join(text.lstrip("+") for text in own) or name
        overrides = (*fixed, *(text for _, text in combination))
        jobs.append(Job(arm, seeds[0] if seeds else seed, overrides, str(number)))
    return jobs


@dataclass(frozen=True)
class Plan:
    """sweep.json.

    Attributes:
        baseline: the arm that the others are compared to.
        command: the command line that started it; resume: the one that goes on with it, less its directory.
        threshold: mean reward that steps and tokens are counted to; None: half the best arm's last.
        made_with: commit, versions and machine that it was started on.
        tracking: uri, experiment and artifacts of the MLflow store; empty without one.
        mlflow_run_id: the sweep's own run there, which holds the jobs' runs.
    """

    name: str
    baseline: str
    jobs: tuple[Job, ...]
    command: str
    resume: str
    threshold: float | None = None
    made_with: Mapping[str, str] = field(default_factory=dict)
    tracking: Mapping[str, str | None] = field(default_factory=dict)
    mlflow_run_id: str | None = None

    def __post_init__(self) -> None:
        if self.baseline not in self.arms:
            raise UserError(f"sweep.baseline={self.baseline}: there is no such arm{nearest(self.baseline, self.arms)}")
        (job, count), *_ = Counter((job.arm, job.seed) for job in self.jobs).most_common(1)
        if count > 1:
            raise UserError(f"arm {job[0]} with seed {job[1]} stands there {count} times")

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(job.arm for job in self.jobs))

    @property
    def seeds(self) -> list[int]:
        return sorted({job.seed for job in self.jobs})

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
        jobs = tuple(Job(**{**job, "overrides": tuple(job["overrides"])}) for job in plan.pop("jobs"))
        return Plan(**plan, jobs=jobs)


def job_state(sweep_dir: Path, job: Job) -> JobState:
    return RunDir(sweep_dir / job.directory).status().get("state", "missing")


def job_arguments(sweep_dir: Path, job: Job, plan: Plan, fail_fast: bool = False) -> list[str]:
    """The overrides that start a job, or go on with its run if it has one. A launcher may start it anywhere."""
    place = [f"hydra.sweep.dir={_quoted(str(sweep_dir.absolute()))}", f"hydra.sweep.subdir={job.directory}"]
    place += ["sweep.fail_fast=true"] if fail_fast else []
    if RunDir(sweep_dir / job.directory).has_run:
        return [*place, "resume=true"]
    tags = {"sweep": plan.name, "arm": job.arm}
    shown = [
        f"tracking.run_name={_quoted(f'{job.arm}, seed {job.seed}')}",
        *(f"++tracking.tags.{key}={_quoted(value)}" for key, value in tags.items()),
    ]
    if plan.tracking:
        shown.append(f"tracking.experiment={_quoted(str(plan.tracking['experiment']))}")
    if plan.mlflow_run_id:
        shown.append(f"tracking.parent_run_id={plan.mlflow_run_id}")
    return [*place, *job.overrides, *shown]


def _quoted(text: str) -> str:
    """A string in Hydra's override grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def unfinished(sweep_dir: Path, jobs: Iterable[Job]) -> list[Job]:
    return [job for job in jobs if job_state(sweep_dir, job) != "finished"]


def any_failed(sweep_dir: Path) -> bool:
    """True if a job of the sweep there has failed; False where there is no sweep."""
    if not (sweep_dir / "sweep.json").is_file():
        return False
    return any(job_state(sweep_dir, job) == "failed" for job in Plan.read(sweep_dir).jobs)


def clear_failures(sweep_dir: Path, jobs: Iterable[Job]) -> None:
    """Jobs that failed will be gone on with: with sweep.fail_fast their old failures shall not stop the others."""
    for job in jobs:
        if job_state(sweep_dir, job) == "failed":
            RunDir(sweep_dir / job.directory).set_state("interrupted")


def summary(sweep_dir: Path, plan: Plan, errors: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """A line for each job that is not finished, with its reason and its log; then the count, and how to go on.

    Args: errors: a launcher's messages about jobs, by directory; for jobs without a run directory there is no other.
    """
    lines = []
    for job in unfinished(sweep_dir, plan.jobs):
        status = RunDir(sweep_dir / job.directory).status()
        error = status.get("error") if status else errors.get(job.directory)
        reason = f": {error}" if error else ""
        state = status.get("state", "missing")
        log = f" ({sweep_dir / job.directory / 'run.log'})" if status else ""
        lines.append(f"{job.arm}, seed {job.seed}: {'not started' if not status else state}{reason}{log}")
    count = f"{len(plan.jobs) - len(lines)} of {len(plan.jobs)} jobs finished in {sweep_dir}"
    go_on = [f"to go on with the others: {plan.resume} hydra.sweep.dir={sweep_dir}"] if lines else []
    return [*lines, count, *go_on]
