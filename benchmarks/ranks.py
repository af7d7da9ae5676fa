"""Runs on several ranks against one: the largest difference of each metric over five steps.

python -m benchmarks.ranks                   two ranks, the default experiment
python -m benchmarks.ranks --cases context experiment=debug "reward.format.pattern='[0-9]'"

All sample with vLLM inside each rank, and differ by rounding alone: one rank decodes all completions together, each of
two ranks half of them.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import NO_CHECKPOINTS, rlpost

REDUCERS = {
    "grpo": ["reducer=grpo"],
    "drgrpo": ["reducer=drgrpo", "reducer.divisor=1000"],
    "function": [
        "reducer=function",
        "reducer.path=docs/examples/miles_reducer.py:get_pg_loss_reducer",
        "plugins.allow=[miles_reducer]",
    ],
}
RANKS = {
    "two": [["cluster=cpu2"]],
    "context": [
        ["cluster=cpu2", "trainer.context_parallel=2"],
        ["cluster=cpu2", "cluster.num_processes=4", "trainer.context_parallel=2"],
    ],
}
CLOCK = ("time/", "memory/", "rollout/tokens_per_s", "train/tokens_per_s")


def differences(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, float]:
    """By metric: the largest absolute difference over the steps; infinite where only one of the two knows a value."""

    def difference(a: float | None, b: float | None) -> float:
        return (0.0 if a is b else float("inf")) if a is None or b is None else abs(a - b)

    names = [name for name in expected[0] if not name.startswith(CLOCK)]
    return {name: max(difference(a[name], b[name]) for a, b in zip(rows, expected, strict=True)) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", choices=list(RANKS), default="two")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="of all runs")
    arguments = parser.parse_args()
    common = [*arguments.overrides, f"steps={arguments.steps}", "tracking=none", "cluster.threads=1", *NO_CHECKPOINTS]
    measured = []
    with tempfile.TemporaryDirectory() as directory:
        for reducer, overrides in REDUCERS.items():
            one, _ = rlpost(Path(directory) / reducer, *common, *overrides)
            for number, ranks in enumerate(RANKS[arguments.cases]):
                run = Path(directory) / f"{reducer}-{number}"
                rows, _ = rlpost(run, *common, *overrides, *ranks)
                gaps = differences(rows, one)
                largest = max(gaps, key=gaps.__getitem__)
                print(f"{reducer:<9} {' '.join(ranks):<80} largest {gaps[largest]:.2g} ({largest})", flush=True)
                measured.append({"reducer": reducer, "ranks": ranks, "differences": gaps})
    if arguments.out:
        arguments.out.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
