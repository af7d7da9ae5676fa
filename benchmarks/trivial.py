"""A cluster that trains nothing: what is left of a run is the platform's own work."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from rlpost.record.rundir import RunDir


@dataclass(frozen=True)
class Trivial:
    """Writes a run's files in place of its workers: a reward that climbs by `slope` a step from one of the seed's.

    Attributes:
        fail_seed: the seed whose run fails instead.
        processes: a job goes on once so many processes have begun one of the sweep.
    """

    slope: float = 0.1
    fail_seed: int | None = None
    processes: int = 1
    num_processes: int = 1
    threads: int | None = None
    max_restarts: int = 0

    def launch(self, run_dir: Path) -> int:
        run = RunDir(run_dir)
        settings = run.settings()
        (run_dir / "started_by").write_text(str(os.getppid()), encoding="utf-8")  # on Ray: the node's own process
        deadline = time.monotonic() + 60
        while (
            len({text for file in run_dir.parent.glob("*/started_by") if (text := file.read_text())}) < self.processes
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.processes} processes were to begin a job")
            time.sleep(0.05)
        if settings.seed == self.fail_seed:
            run.set_state("failed", error="RuntimeError: fail_seed")
            return 1
        rewards = [0.1 * (settings.seed % 3) + self.slope * step for step in range(1, settings.steps + 1)]
        rows = [
            {
                "step": step,
                "reward/mean": reward,
                "completions/length_mean": 10.0,
                "tokens/total": 100 * step,
            }
            for step, reward in enumerate(rewards, start=1)
        ]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        last = rewards[-5:]
        run.write_result({"steps": settings.steps, "reward_last_5": sum(last) / len(last)})
        run.set_state("finished", step=settings.steps)
        return 0
