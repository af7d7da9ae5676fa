"""All benchmarks, and docs/benchmarks from them: python -m benchmarks [--only NAME ...] [--repeats N] [--out DIR]

`--only` measures some anew and keeps the rest of DIR/results.json.
"""

import argparse
import datetime
import json
import os
import sys
from pathlib import Path

from benchmarks import against_trl, floor, growth, overhead, page, plan
from benchmarks.common import ROOT, cpu
from rlpost.record import provenance

NAMES = ["against_trl", "floor", "memory", "growth", "overhead", "plan"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side against trl")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "results.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    measures = {
        "against_trl": lambda: against_trl.measure(arguments.repeats),
        "floor": floor.measure,
        "memory": growth.measure_memory,
        "growth": growth.measure,
        "overhead": overhead.measure,
        "plan": plan.measure,
    }
    for name in arguments.only:
        measured = measures[name]()
        results[name] = {
            "results": measured,
            "date": datetime.date.today().isoformat(),
            "machine": provenance.machine(),
            "versions": provenance.versions(),
            "commit": provenance.git_state(ROOT).get("git.commit", ""),
            "cpu": cpu(),
            "threads": os.environ.get("OMP_NUM_THREADS", "all cores"),
        }
        file.write_text(json.dumps(results, indent=1) + "\n")  # what was measured stays, whatever comes next
        page.write(json.loads(file.read_text()), arguments.out)
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
