"""(e), (f): from the command to the first step, and what the platform itself takes a step."""

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import NO_CHECKPOINTS, ROOT, module, rlpost

# No generation and no update: what is left of a step is drawing, scoring, advantages, packing, metrics and tracking.
COUNTED = ("time/rollout", "time/update", "time/sync")


def start_up(repeats: int = 3) -> list[float]:
    """Seconds from the command to the line that says the first step begins, MLflow on, everything cached on disk."""
    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(repeats + 1):
            started = time.perf_counter()
            tracking = [f"tracking.uri=sqlite:///{directory}/mlflow.db", f"tracking.artifacts={directory}/artifacts"]
            command = module("rlpost", f"run_dir={directory}/run-{number}", "steps=1", *tracking, *NO_CHECKPOINTS)
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            for line in process.stdout:
                if "ready in" in line:
                    seconds.append(time.perf_counter() - started)
            if process.wait():
                raise RuntimeError("the run failed")
    return seconds[1:]  # the first one reads the libraries from the disk


def overhead(steps: int = 20) -> dict[str, Any]:
    """The default experiment on the tiny model, 8 prompts x 8 samples of 32 tokens, MLflow on."""
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        tracking = [f"tracking.uri=sqlite:///{directory}/mlflow.db", f"tracking.artifacts={directory}/artifacts"]
        rows, _ = rlpost(Path(directory) / "run", "model=tiny", f"steps={steps}", *tracking, *NO_CHECKPOINTS)
        whole = time.perf_counter() - started
    rest = [row["time/step"] - sum(row[name] for name in COUNTED) for row in rows[2:]]
    return {"inside the step": rest, "between steps": [row["time/between_steps"] for row in rows[2:]], "whole": whole}


def measure() -> dict[str, Any]:
    print("start-up", flush=True)
    started = start_up()
    print("the platform's own time a step", flush=True)
    return {"start_up": started, "overhead": overhead()}
