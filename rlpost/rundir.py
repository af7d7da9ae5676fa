"""A run directory's own files: the configuration a run has, and the state it is in."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from rlpost.errors import UserError

State = Literal["starting", "running", "finished", "failed", "interrupted"]


class RunDir:
    def __init__(self, path: Path) -> None:
        self.path = path

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
        _replace(self.path / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(list(overrides))))
        own = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "sweep"])
        _replace(self.path / "config.yaml", OmegaConf.to_yaml(own, resolve=True))

    def config(self) -> DictConfig:
        return OmegaConf.load(self.path / "config.yaml")

    def overrides(self) -> list[str]:
        return list(OmegaConf.load(self.path / "overrides.yaml"))

    def status(self) -> dict[str, Any]:
        file = self.path / "status.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def set_state(self, state: State, **details: Any) -> None:
        """Write status.json: the state, since when, and details (step, error, mlflow_run_id), kept from before."""
        kept = {k: v for k, v in self.status().items() if k not in ("error", "kind")}
        status = {
            **kept,
            "state": state,
            "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "pid": os.getpid(),
            **details,
        }
        _replace(self.path / "status.json", json.dumps(status, indent=2) + "\n")

    def write_result(self, result: dict[str, Any]) -> None:
        _replace(self.path / "result.json", json.dumps(result, indent=2) + "\n")

    def result(self) -> dict[str, Any]:
        return json.loads((self.path / "result.json").read_text(encoding="utf-8"))


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old content or the new one, never a part."""
    building = path.with_name(f".{path.name}.tmp")
    building.write_text(text, encoding="utf-8")
    building.replace(path)
