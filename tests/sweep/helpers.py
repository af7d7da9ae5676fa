"""Sweeps written by hand: the files that jobs would have left."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from rlpost.record.completions import completions_table
from rlpost.sweep.arms import Plan, named_arms
from tests.conftest import make_rollout

REDUCERS = {
    "grpo": {"_target_": "rlpost.objective.reducers.SequenceMean"},
    "d64": {"_target_": "rlpost.objective.reducers.ConstantDivisor", "divisor": 64},
    "token_mean": {"_target_": "rlpost.objective.reducers.TokenMean"},
}


def make_plan(sweep_dir: Path, arms: Sequence[str], seeds: Sequence[int], **fields: Any) -> Plan:
    jobs = named_arms({arm: [] for arm in arms}, seeds)
    plan = Plan("by_hand", arms[0], tuple(jobs), "rlpost by hand", "rlpost -m resume=true", **fields)
    plan.write(sweep_dir)
    return plan


def make_job(
    sweep_dir: Path,
    arm: str,
    seed: int,
    rewards: Sequence[float],
    metrics: Mapping[str, Sequence[float | None]] | None = None,
    **status: Any,
) -> None:
    """A job with a step for each reward; `metrics` has a value a step, or one for step 0 as well."""
    run = sweep_dir / arm / f"seed-{seed}"
    (run / "completions").mkdir(parents=True)
    config = {
        "name": arm,
        "run_dir": str(run),
        "seed": seed,
        "reducer": REDUCERS[arm],
        "algorithm": {"mask_truncated": False},
        "rollout": {"max_tokens": 32},
        "tracking": {"run_name": f"{arm}, seed {seed}", "experiment": "sweep"},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "status.json").write_text(json.dumps({"state": "finished", "pid": 1, **status}))
    lines: list[dict[str, Any]] = [
        {"step": step, "reward/mean": reward, "completions/length_mean": 5.0, "tokens/total": 100 * step}
        for step, reward in enumerate(rewards, start=1)
    ]
    for name, values in (metrics or {}).items():
        if len(values) > len(rewards) and lines[0]["step"] == 1:
            lines.insert(0, {"step": 0})
        for line, value in zip(lines, values, strict=True):
            line[name] = value
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rollouts = [make_rollout(completion=[1] * length, sample_index=i) for i, length in enumerate((2, 6))]
    pq.write_table(completions_table(rollouts, 1), run / "completions" / "step-000001.parquet")
