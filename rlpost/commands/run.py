"""The command line: compose, validate, make the run directory, launch. Imports neither torch nor vLLM.

Exit codes: 0 finished; 1 failed while running; 2 the configuration or the input is wrong; 130 interrupted.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpost.cluster.process import family
from rlpost.cluster.protocol import Cluster
from rlpost.config.build import build, conf_dir, prepare, resolve_paths, schema
from rlpost.config.explain import explain
from rlpost.config.schema import Config
from rlpost.config.validation import validate
from rlpost.data.stream import rising
from rlpost.errors import UserError
from rlpost.record.rundir import RunDir
from rlpost.sweep.arms import SweepFailedError, any_failed


class RunFailedError(Exception):
    """A run's workers ended with an exit code other than 0; they have said why."""

    def __init__(self, run_dir: Path, code: int) -> None:
        super().__init__(f"{run_dir} ended with exit code {code}; its log is {run_dir / 'run.log'}")
        self.run_dir = run_dir
        self.code = code

    def __reduce__(self) -> tuple[type["RunFailedError"], tuple[Path, int]]:
        return RunFailedError, (self.run_dir, self.code)  # launchers carry it between processes


# Hydra adds lines of its own to an error that passes through it. A sweep needs that (a job is failed by raising);
# a single run's error goes around it.
_single_run_error: Exception | None = None


def main() -> None:
    sys.exit(_run())


def _run() -> int:
    # Hydra would print its own errors and exit with 1; they are said in one line here, and exit with 2.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with family():
            _app()
        if _single_run_error is not None:
            raise _single_run_error
    except RunFailedError as failed:
        if failed.code not in (2, 130):
            print(f"rlpost: {failed}", file=sys.stderr)
        return failed.code
    except SweepFailedError as failed:
        print(f"rlpost: {failed}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"rlpost: {error}", file=sys.stderr)
        return 2
    except (HydraException, OmegaConfBaseException) as error:
        print(f"rlpost: {explain(error, sys.argv[1:], conf_dir())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


@hydra.main(config_path=str(conf_dir()), config_name="train", version_base="1.3")
def _app(cfg: DictConfig) -> float | None:
    """One job. Returns: its mean reward over the last five steps, which a Hydra sweeper may optimise."""
    global _single_run_error
    try:
        return _job(cfg)
    except Exception as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            if isinstance(error, RunFailedError) and error.code == 130:
                raise KeyboardInterrupt from error  # ends the sweep, not this job alone
            raise
        _single_run_error = error
        return None


def _job(cfg: DictConfig) -> float | None:
    os.chdir(HydraConfig.get().runtime.cwd)  # where the command was given: a launcher's workers may be elsewhere
    output_dir = Path(HydraConfig.get().runtime.output_dir)
    cfg.run_dir = str(output_dir)
    overrides = list(HydraConfig.get().overrides.task)
    try:
        if cfg.sweep.fail_fast and any_failed(Path(HydraConfig.get().sweep.dir)):
            raise SweepFailedError(f"{output_dir} is not started: another job has failed")
        run, cfg = _resumed(output_dir, overrides) if cfg.resume else _fresh(output_dir, cfg, overrides)
    finally:
        if not any(output_dir.iterdir()):  # Hydra has made it already
            output_dir.rmdir()
    if cfg.resume and run.status().get("state") == "finished" and run.status().get("step", 0) >= cfg.steps:
        print(f"{run.path} has finished its {cfg.steps} steps already; steps=... goes further")
    else:
        run.set_state("starting")  # a resumed run's last state is not this one's
        try:
            cluster: Cluster = build(cfg.cluster)
            code = cluster.launch(run.path)
        except UserError as error:  # no such cluster, or no room on it
            run.set_state("failed", error=str(error), kind="configuration")
            raise
        if code:
            _settle(run, cfg, code)
            raise RunFailedError(run.path, code)
    return run.result()["reward_last_5"]


def _settle(run: RunDir, cfg: DictConfig, code: int) -> None:
    """Workers that were killed could not say so themselves: status.json and MLflow shall not call them running."""
    status = run.status()
    if status.get("state") in ("starting", "running"):
        run.set_state("failed", error=f"the workers ended with exit code {code}")
    elif status.get("kind") != "killed":  # what the launcher wrote for a rank that could not
        return
    run_id = run.status().get("mlflow_run_id")
    if cfg.tracking.uri and run_id:
        script = "import sys; from rlpost.record.mlflow_store import end_run; end_run(*sys.argv[1:])"
        command = [sys.executable, "-c", script, cfg.tracking.uri, run_id, "FAILED"]
        subprocess.run(command, check=False, timeout=120, stderr=subprocess.DEVNULL)


def _fresh(output_dir: Path, cfg: DictConfig, overrides: Sequence[str]) -> tuple[RunDir, DictConfig]:
    settings = validate(cfg)
    prepare(settings)
    check_task(settings)
    resolve_paths(cfg)
    run = RunDir(output_dir.absolute())
    run.create(cfg, overrides)
    return run, cfg


def check_task(settings: Config) -> None:
    """Load the task, so that a wrong file, field or split is answered before anything heavy starts."""
    data = build(settings.task).load()
    if settings.stream.curriculum is not None:
        rising(data.train, settings.stream.curriculum)
    e = settings.evaluation
    asked = [key for key, is_set in (("every", e.every), ("at_start", e.at_start), ("at_end", e.at_end)) if is_set]
    if asked and not data.held_out:
        raise UserError(
            f"evaluation.{asked[0]}={getattr(e, asked[0])}: the task holds out no prompts to evaluate; hold some out, or "
            "set " + ", ".join(f"evaluation.{key}={0 if key == 'every' else 'false'}" for key in asked)
        )
    if not data.train:
        raise UserError("task: no prompt is left to train on; hold out fewer, or give held-out rows that differ")


def _resumed(output_dir: Path, overrides: Sequence[str]) -> tuple[RunDir, DictConfig]:
    """The configuration the run was started with, with the values (not the groups) this command line changes."""
    run = RunDir(output_dir.absolute())
    if not run.has_run:
        raise UserError(f"run_dir={run.path}: there is no run to resume")
    cfg = OmegaConf.merge(schema(), run.config())
    assert isinstance(cfg, DictConfig)
    changes = [
        o
        for o in OverridesParser.create().parse_overrides(list(overrides))
        if o.key_or_group not in ("run_dir", "resume") and not str(o.key_or_group).startswith("sweep.")
    ]
    for change in changes:
        if isinstance(OmegaConf.select(cfg, change.key_or_group), DictConfig):
            raise UserError(
                f"{change.input_line}: resume=true goes on with the run's own {change.key_or_group}; only single "
                "values can be changed"
            )
        OmegaConf.set_struct(cfg, True)
        OmegaConf.update(cfg, change.key_or_group, change.value())
    cfg.resume = True
    cfg.run_dir = str(run.path)
    prepare(validate(cfg))
    run.write_config(cfg, [*run.overrides(), *(str(change.input_line) for change in changes)])
    return run, cfg
