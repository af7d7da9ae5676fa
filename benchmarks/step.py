"""Time the default step, phase by phase: a real run of a few steps, medians over all but the first.

python benchmarks/step.py --steps 6 model=tiny
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PHASES = ["rollout", "reward", "update", "sync", "step"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="the first is left out: it warms up")
    parser.add_argument("overrides", nargs="*", help="as for rlpost")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        fixed = [f"run_dir={run}", f"steps={arguments.steps}", "tracking=none", "evaluation.at_end=false"]
        fixed += ["checkpoint.every=0", "checkpoint.at_end=false"]
        command = [sys.executable, "-m", "rlpost", *fixed, *arguments.overrides]
        code = subprocess.run(command).returncode
        if code:
            return code
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][1:]
    tokens = [row["completions/length_mean"] for row in rows]
    print(f"\n{len(rows)} steps, completions of {statistics.median(tokens):.1f} tokens (median)\n")
    print(f"{'phase':<10}{'min s':>8}{'median s':>10}{'max s':>8}")
    for phase in PHASES:
        seconds = [row[f"time/{phase}"] for row in rows]
        print(f"{phase:<10}{min(seconds):>8.2f}{statistics.median(seconds):>10.2f}{max(seconds):>8.2f}")
    for name in ("rollout/tokens_per_s", "train/tokens_per_s", "memory/rss_gb"):
        print(f"{name:<22}{statistics.median(row[name] for row in rows):>10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
