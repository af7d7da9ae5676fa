"""Metrics of a step's rollouts: their rewards and completions, over all ranks."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rlpost.types import Rollout


def rollout_metrics(rollouts: Sequence[Rollout], correct: Callable[[Rollout], bool]) -> dict[str, float]:
    """reward/* and completions/* of one step; NaN where nothing is left to average."""
    metrics: dict[str, float] = {}
    metrics.update(_moments("reward", [r.reward for r in rollouts]))
    for name in rollouts[0].rewards:
        metrics.update(_moments(f"reward/{name}", [r.rewards[name] for r in rollouts]))
    metrics["reward/zero_std_groups"] = _mean(
        len({reward for reward in rewards if not math.isnan(reward)}) < 2
        for rewards in _rewards_by_group(rollouts).values()
    )

    metrics["reward/not_applicable"] = _mean(math.isnan(r.reward) for r in rollouts)
    metrics["reward/errors"] = sum(len(r.reward_errors) for r in rollouts)

    lengths = [len(r.completion.token_ids) for r in rollouts]
    metrics.update(
        {
            "completions/length_mean": _mean(lengths),
            "completions/length_min": min(lengths),
            "completions/length_max": max(lengths),
            "completions/length_terminated": _mean_length(rollouts, lambda r: r.completion.finish_reason == "stop"),
            "completions/length_correct": _mean_length(rollouts, correct),
            "completions/length_incorrect": _mean_length(rollouts, lambda r: not correct(r)),
            "completions/truncated": _mean(r.completion.finish_reason == "length" for r in rollouts),
        }
    )
    return metrics


def _rewards_by_group(rollouts: Sequence[Rollout]) -> dict[int, list[float]]:
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt.group_id, []).append(rollout.reward)
    return groups


def _moments(name: str, values: Sequence[float]) -> dict[str, float]:
    known = [value for value in values if not math.isnan(value)]
    std = float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
    return {f"{name}/mean": _mean(known), f"{name}/std": std}


def _mean_length(rollouts: Sequence[Rollout], chosen: Callable[[Rollout], bool]) -> float:
    return _mean(len(r.completion.token_ids) for r in rollouts if chosen(r))


def _mean(values: Iterable[float]) -> float:
    numbers = [float(value) for value in values]
    return math.fsum(numbers) / len(numbers) if numbers else math.nan
