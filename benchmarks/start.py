"""What a job of a sweep takes until its first step begins, and how much of a sweep of short jobs is steps and evaluation.

Jobs on the tiny model run one after another on one thread; their workers are forks. Usage:
python -m benchmarks.start [JOBS]
python -m benchmarks.start SWEEP_DIR JOBS_SIDE_BY_SIDE     (a sweep that has run: its wall clock against its jobs' steps)
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from benchmarks.common import NO_CHECKPOINTS

READY = re.compile(r"ready for the first step: ([\d.]+) s, ([\d.]+) core-seconds")
TIMED = ("time/step", "time/evaluation")


def starts(rollout: str, jobs: int) -> list[tuple[float, float]]:
    """Seconds and core-seconds of each job's worker from its begin to its first step's; the first job made the server."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "rlpost", "-m", "experiment=debug", f"rollout={rollout}", "steps=1"]
        command += [f"seed=range({jobs})", "cluster.threads=1", "tracking=none", *NO_CHECKPOINTS]
        command += ["reward.format.pattern='[0-9]'", f"hydra.sweep.dir={directory}/sweep"]
        subprocess.run(command, check=True, cwd=directory, stdout=subprocess.DEVNULL)
        found = [READY.search((Path(directory) / f"sweep/{job}/run.log").read_text()) for job in range(jobs)]
    return [(float(one[1]), float(one[2])) for one in found if one is not None]


def share(sweep_dir: Path, side_by_side: int) -> dict[str, float]:
    """A sweep's wall clock, from its first job's begin to its report, against what its jobs' steps and evaluations took."""
    plan = json.loads((sweep_dir / "sweep.json").read_text())
    runs = [sweep_dir / job["directory"] for job in plan["jobs"]]
    rows = [json.loads(line) for run in runs for line in (run / "metrics.jsonl").read_text().splitlines()]
    inside = sum(row.get(name) or 0.0 for row in rows for name in TIMED)
    began = (sweep_dir / "sweep.json").stat().st_mtime
    ended = (sweep_dir / "report/report.html").stat().st_mtime
    print(f"from {datetime.fromtimestamp(began):%H:%M:%S} to {datetime.fromtimestamp(ended):%H:%M:%S}")
    return {"wall": ended - began, "inside": inside / side_by_side, "ratio": (ended - began) * side_by_side / inside}


def main() -> None:
    if len(sys.argv) > 2:
        for name, value in share(Path(sys.argv[1]), int(sys.argv[2])).items():
            print(f"{name:>8} {value:8.2f}")
        return
    jobs = int(sys.argv[1]) if sys.argv[1:] else 6
    for rollout in ("transformers", "vllm"):
        seconds, core_seconds = zip(*starts(rollout, jobs)[1:], strict=True)
        print(
            f"{rollout:>12}: {statistics.median(core_seconds):.2f} core-seconds ({min(core_seconds):.2f} to "
            f"{max(core_seconds):.2f}), {statistics.median(seconds):.2f} s, {jobs - 1} jobs"
        )


if __name__ == "__main__":
    main()
