"""The default Hydra sweeper: named arms over seeds, or the command line's choices. Hydra takes plug-ins from this
namespace package only.

rlpost -m reducer=drgrpo reducer.divisor=64,256,1024 seed=0,1,2

sweep:
  arms: {grpo: [reducer=grpo], drgrpo_64: [reducer=drgrpo, reducer.divisor=64]}
  seeds: [0, 1, 2]
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rlpost.cluster import node, process
from rlpost.config.build import conf_dir, prepare, resolve_paths
from rlpost.config.nodes import as_dict
from rlpost.config.validation import validate
from rlpost.errors import UserError
from rlpost.record import provenance
from rlpost.sweep import parent_run
from rlpost.sweep.arms import (
    Job,
    Plan,
    SweepFailedError,
    choices,
    clear_failures,
    job_arguments,
    job_state,
    named_arms,
    summary,
    unfinished,
)

# Their jobs start workers on this machine, with this process's environment.
LAUNCHERS_HERE = {
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
}


@dataclass
class SweeperConfig:
    _target_: str = "hydra_plugins.rlpost_sweeper.ArmsSweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="arms", node=SweeperConfig, provider="rlpost")


class ArmsSweeper(Sweeper):
    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        HydraConfig.instance().set_config(config)  # names in the configuration refer to it
        self._context = hydra_context
        self._config = config
        self._composed: dict[tuple[str, ...], DictConfig] = {}  # by overrides, the seed's left out
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run what is not finished, and write the report.

        Raises: UserError before the first job starts, SweepFailedError after the last.
        """
        sweep_dir = Path(self._config.hydra.sweep.dir).absolute()
        plan = self._resumed(sweep_dir, arguments) if self._config.resume else self._plan(sweep_dir, arguments)
        run_id = parent_run.open_run(plan, sweep_dir, plan.made_with)
        plan = replace(plan, mlflow_run_id=run_id)
        plan.write(sweep_dir)
        pending = unfinished(sweep_dir, plan.jobs)
        clear_failures(sweep_dir, pending)
        returns: Sequence[JobReturn] = []
        errors: dict[str, str] = {}
        status: parent_run.Status = "KILLED"
        try:
            if pending:
                launched = [job_arguments(sweep_dir, job, plan, self._config.sweep.fail_fast) for job in pending]
                returns = self._launcher.launch(launched, initial_job_idx=0)
                ends = zip(pending, returns, strict=True)
                errors = {job.directory: error for job, done in ends if (error := _error(done))}
            status = "FAILED" if unfinished(sweep_dir, plan.jobs) else "FINISHED"
        finally:
            is_reported = self._report(sweep_dir)
            parent_run.close_run(plan, status)
            if status == "KILLED":
                print(*summary(sweep_dir, plan), sep="\n")
        lines = summary(sweep_dir, plan, errors)
        if not is_reported:
            lines.append(f"the report is missing, for the reason above; to write it: rlpost-report {sweep_dir}")
        if status == "FAILED" or not is_reported:
            raise SweepFailedError("\n".join(lines))
        print(*lines, sep="\n")
        return returns

    def _report(self, sweep_dir: Path) -> bool:
        """Write the report and print what it says. Returns: whether it was written.

        A process of its own does it: where the jobs' workers are forks it is one too, with most of its imports done.
        """
        sys.stdout.flush()
        environment = node.environment(1, self._config.cluster.get("threads"))
        return process.start("rlpost.commands.report", [str(sweep_dir)], environment).wait() == 0

    def _resumed(self, sweep_dir: Path, arguments: Sequence[str]) -> Plan:
        for argument in arguments:
            if not argument.startswith(("resume=", "sweep.fail_fast=")):
                raise UserError(f"{argument}: resume=true goes on with the sweep as it was planned")
        plan = Plan.read(sweep_dir)
        for job in plan.jobs:
            if job_state(sweep_dir, job) == "missing" and self._validate(job) != job.config_hash:
                raise UserError(
                    f"arm {job.arm}, seed {job.seed}: its configuration is not the one that was planned; go on with "
                    f"{plan.resume} hydra.sweep.dir={sweep_dir}, and the files it reads as they were"
                )
        return plan

    def _plan(self, sweep_dir: Path, arguments: Sequence[str]) -> Plan:
        if (sweep_dir / "sweep.json").is_file():
            raise UserError(f"{sweep_dir} holds a sweep already; resume=true goes on with it")
        cfg = self._config.copy()
        sweep = cfg.sweep
        name = str(cfg.name)
        if sweep.arms:
            jobs = named_arms(as_dict(sweep.arms), list(sweep.seeds), arguments)
        else:
            jobs = choices(arguments, self._context.config_loader, name, cfg.seed)
        resolve_paths(cfg)
        tracking = {key: cfg.tracking[key] for key in ("uri", "experiment", "artifacts")} if cfg.tracking.uri else {}
        command = f"rlpost {shlex.join(sys.argv[1:])}"
        made_with = provenance.git_state(conf_dir()) | provenance.machine() | provenance.versions()
        baseline = sweep.baseline or jobs[0].arm
        plan = Plan(name, baseline, tuple(jobs), command, _resume_command(), sweep.threshold, made_with, tracking)
        return replace(plan, jobs=tuple(replace(job, config_hash=self._validate(job)) for job in plan.jobs))

    def _validate(self, job: Job) -> str:
        """Validate a job's configuration, and begin its workers' imports.

        Returns: its hash.

        Raises: UserError that names the arm.
        """
        try:
            own = self._compose(job)
            settings = validate(own)
            if self._config.hydra.launcher._target_ in LAUNCHERS_HERE:
                prepare(settings)
        except UserError as error:
            raise UserError(f"arm {job.arm}: {error}") from error
        return provenance.config_hash(own)

    def _compose(self, job: Job) -> DictConfig:
        """The job's configuration, less Hydra's part. Composing takes half a second, so an arm's seeds share it."""
        arm = tuple(override for override in job.overrides if not override.startswith("seed="))
        if arm not in self._composed:
            composed = self._context.config_loader.load_sweep_config(self._config, list(job.overrides))
            self._composed[arm] = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
        self._composed[arm].seed = job.seed
        return self._composed[arm]


def _resume_command() -> str:
    """The command line's configuration without its overrides."""
    parser = argparse.ArgumentParser(add_help=False)
    flags = {"config_path": "-cp", "config_dir": "-cd", "config_name": "-cn"}
    for name, short in flags.items():
        parser.add_argument(short, f"--{name.replace('_', '-')}", dest=name)
    given, _ = parser.parse_known_args(sys.argv[1:])
    kept = [(f"--{name.replace('_', '-')}", value) for name in flags if (value := getattr(given, name)) is not None]
    return shlex.join(["rlpost", *(part for pair in kept for part in pair), "-m", "resume=true"])


def _error(done: JobReturn) -> str | None:
    """The last line of the exception that a job ended with; None if it ended well."""
    try:
        done.return_value  # noqa: B018 - raises it
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else 'no reason'}"
    return None
