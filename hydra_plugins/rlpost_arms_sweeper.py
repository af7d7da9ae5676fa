"""The Hydra sweeper of named arms over seeds. Hydra takes plug-ins from this namespace package only.

hydra:
  mode: MULTIRUN
  sweeper:
    arms: {grpo: [reducer=grpo], drgrpo_64: [reducer=drgrpo, reducer.divisor=64]}
    seeds: [0, 1, 2]
    baseline: grpo
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rlpost.config import validate
from rlpost.errors import UserError
from rlpost.sweep.arms import Job, Plan, SweepFailedError, expand, job_arguments, summary, unfinished


@dataclass
class ArmsSweeperConfig:
    _target_: str = "hydra_plugins.rlpost_arms_sweeper.ArmsSweeper"
    arms: dict[str, list[str]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    baseline: str = "grpo"
    fail_fast: bool = False  # start no further job once one has failed


ConfigStore.instance().store(group="hydra/sweeper", name="arms", node=ArmsSweeperConfig, provider="rlpost")


class ArmsSweeper(Sweeper):
    def __init__(self, arms: DictConfig, seeds: Sequence[int], baseline: str, fail_fast: bool) -> None:
        self._arms = {str(name): list(overrides) for name, overrides in arms.items()}
        self._seeds = list(seeds)
        self._baseline = baseline
        self._fail_fast = fail_fast

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context = hydra_context
        self._config = config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Run what is not finished. Raises: UserError before the first job starts, SweepFailedError after the last."""
        sweep_dir = Path(self._config.hydra.sweep.dir).absolute()
        if "resume=true" in arguments:
            plan = Plan.read(sweep_dir)
        else:
            if (sweep_dir / "sweep.json").is_file():
                raise UserError(f"{sweep_dir} holds a sweep already; resume=true goes on with it")
            plan = Plan(
                self._config.name, self._baseline, tuple(expand(self._arms, self._seeds, self._baseline, arguments))
            )
            for job in plan.jobs:
                self._validate(job)
            plan.write(sweep_dir)
        pending = unfinished(sweep_dir, plan.jobs)
        returns = []
        for index, batch in enumerate([[job] for job in pending] if self._fail_fast else [pending]):
            if batch:
                launched = [job_arguments(sweep_dir, job) for job in batch]
                returns.append(self._launcher.launch(launched, initial_job_idx=index))
            if self._fail_fast and unfinished(sweep_dir, batch):
                break
        lines = summary(sweep_dir, plan.jobs)
        if unfinished(sweep_dir, plan.jobs):
            raise SweepFailedError("\n".join(lines))
        print(*lines, sep="\n")
        return returns

    def _validate(self, job: Job) -> None:
        try:
            composed = self._context.config_loader.load_sweep_config(self._config, list(job.overrides))
            with_run = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
            validate(with_run)
        except UserError as error:
            raise UserError(f"arm {job.arm}: {error}") from error
