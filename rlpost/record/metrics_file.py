"""metrics.jsonl, the record of a run's steps."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """metrics.jsonl: one flat JSON object a step, flushed to the disk line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, step: int, metrics: Mapping[str, float]) -> dict[str, float | None]:
        """Write a step's line. A value that is not finite becomes null. Returns: what was written, less the step."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return finite

    def rows(self) -> Iterator[dict[str, Any]]:
        """The steps written so far. A last line cut short by a crash is left out."""
        if not self._path.is_file():
            return
        for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)

    def keep_until(self, step: int) -> None:
        """Drop the lines after `step`: a resumed run writes them again."""
        kept = [row for row in self.rows() if row["step"] <= step]
        replacement = self._path.with_suffix(".tmp")
        replacement.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        replacement.replace(self._path)
