"""The platform's own time a job of a sweep: sweeps of runs that train nothing, of 10 jobs and of 100.

What it times: composing, validating, the run directory, the launcher, and the report at the end. Usage:
python benchmarks/sweep.py [JOBS ...]
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    counts = [int(argument) for argument in sys.argv[1:]] or [10, 100]
    print(f"{'jobs':>5} {'seconds':>9} {'s a job':>9} {'report, s':>10}")
    whole: list[float] = []
    for jobs in counts:
        with tempfile.TemporaryDirectory() as directory:
            sweep_dir = Path(directory) / "sweep"
            command = [sys.executable, "-m", "rlpost", "-m", "tracking=none", "plugins.allow=[trivial]"]
            command += ["cluster._target_=trivial.Trivial", "steps=20", f"hydra.sweep.dir={sweep_dir}"]
            command += ["+cluster.slope=0.1,0.2", f"seed=range({jobs // 2})"]
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
            started = time.perf_counter()
            subprocess.run(command, check=True, cwd=directory, env=environment, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - started
            whole.append(seconds)
            started = time.perf_counter()
            report = [sys.executable, "-m", "rlpost.sweep.report", str(sweep_dir)]
            subprocess.run(report, check=True, stdout=subprocess.DEVNULL)
            print(f"{jobs:>5} {seconds:>9.1f} {seconds / jobs:>9.3f} {time.perf_counter() - started:>10.1f}")
    if len(counts) > 1:
        slope = (whole[-1] - whole[0]) / (counts[-1] - counts[0])
        print(f"each further job: {slope:.3f} s; start and report: {whole[0] - slope * counts[0]:.1f} s")


if __name__ == "__main__":
    main()
