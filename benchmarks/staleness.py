"""Seconds a step with sampling one step ahead, against strictly on-policy: a trainer and one vLLM server, a core each.

python -m benchmarks.staleness [overrides of both]
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import NO_CHECKPOINTS, rlpost, spread

COMMON = [
    *("rollout=vllm_server", "rollout.engine.num_servers=1", "rollout.engine.threads=1", "cluster.threads=1"),
    "+algorithm.corrections.tis={_target_: rlpost.objective.corrections.ImportanceSampling}",
    *("tracking=none", *NO_CHECKPOINTS),
]
FIRST = 3  # steps before that one fill what is ahead


def seconds(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[f"time/{name}"] for row in rows if row["step"] >= FIRST]


def main() -> None:
    medians = {}
    with tempfile.TemporaryDirectory() as directory:
        for number, staleness in enumerate((0, 1, 1, 0)):  # in turn: the machine is never quite the same
            settings = [*COMMON, f"rollout.staleness={staleness}", *sys.argv[1:]]
            rows, _ = rlpost(Path(directory) / str(number), *settings)
            parts = "  ".join(
                f"{name} {spread(seconds(rows, name))}" for name in ("step", "rollout", "update", "sampling")
            )
            tokens = [row["tokens/total"] for row in rows]
            print(f"staleness={staleness}  {parts}  tokens {tokens[-1] - tokens[FIRST - 2]}", flush=True)
            medians.setdefault(staleness, []).extend(seconds(rows, "step"))
    on_policy, ahead = (statistics.median(medians[staleness]) for staleness in (0, 1))
    print(f"a step takes {on_policy:.2f} s with 0 and {ahead:.2f} s with 1: {ahead / on_policy:.2f} of it")


if __name__ == "__main__":
    main()
