"""A run directory's own files: the configuration a run has, the state it is in, and its result."""

import json
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpost.config.build import typed
from rlpost.config.nodes import as_dict
from rlpost.config.schema import Config
from rlpost.errors import UserError
from rlpost.record.status import RunStatus, replace_file


class RunDir(RunStatus):
    @property
    def has_run(self) -> bool:
        return (self.path / "config.yaml").is_file()

    def create(self, cfg: DictConfig, overrides: Sequence[str]) -> None:
        """Write what the workers read.

        Raises: UserError if the directory holds a run already.
        """
        if self.has_run:
            raise UserError(f"run_dir={self.path} holds a run already; resume=true goes on with it, or choose another")
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(cfg, overrides)
        self.set_state("starting")

    def write_config(self, cfg: DictConfig, overrides: Sequence[str]) -> None:
        replace_file(self.path / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(list(overrides))))
        own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "sweep"])
        replace_file(self.path / "config.yaml", OmegaConf.to_yaml(own, resolve=True))

    def config(self) -> dict[str, Any]:
        """The content of config.yaml, as plain values."""
        return as_dict(OmegaConf.load(self.path / "config.yaml"))

    def settings(self) -> Config:
        """The run's settings.

        Raises: UserError where there is no run, or its configuration is that of a version of rlpost with other settings.
        """
        if not self.has_run:
            raise UserError(f"{self.path}: not a run directory (no config.yaml)")
        try:
            return typed(OmegaConf.create(self.config()))
        except OmegaConfBaseException as error:
            raise UserError(
                f"{self.path / 'config.yaml'}: {str(error).splitlines()[0]}; another version wrote it"
            ) from error

    def overrides(self) -> list[str]:
        return list(OmegaConf.load(self.path / "overrides.yaml"))

    def write_result(self, result: dict[str, Any]) -> None:
        replace_file(self.path / "result.json", json.dumps(result, indent=2) + "\n")

    def result(self) -> dict[str, Any]:
        return json.loads((self.path / "result.json").read_text(encoding="utf-8"))
