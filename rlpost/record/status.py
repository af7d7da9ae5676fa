"""status.json: the state that a run is in, which its workers and whoever started them write and read."""

import json
import os
import time
from pathlib import Path
from typing import Any, Literal

State = Literal["starting", "running", "finished", "failed", "interrupted"]


class RunStatus:
    """Args: path: the run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

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
        replace_file(self.path / "status.json", json.dumps(status, indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old content or the new one, never a part."""
    building = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # several ranks may have something to say
    building.write_text(text, encoding="utf-8")
    building.replace(path)
