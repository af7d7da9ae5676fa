"""Measures of a finished job, and each arm's summary in them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlpost.sweep.arms import Plan
from rlpost.sweep.results import JobResult
from rlpost.sweep.statistics import (
    Comparison,
    Estimate,
    area_under,
    bootstrap_interval,
    compare,
    estimate,
    first_to_reach,
    interquartile_mean,
)

LAST = 5  # steps that an end value is the mean of


@dataclass(frozen=True)
class Measure:
    """One number of a finished job.

    Attributes:
        tested: whether arms are compared in it. What some jobs never reach is not: the seeds left are no fair sample.
    """

    name: str
    label: str
    of: Callable[[JobResult], float]
    tested: bool = True


def measures(threshold: float) -> list[Measure]:
    """The table's measures, the two primary ones first. Args: threshold: the mean reward that first_to_reach counts to."""
    return [
        Measure("reward_end", f"mean reward, last {LAST} steps", lambda r: _end(r, "reward/mean")),
        Measure("accuracy_end", "held-out accuracy, last", lambda r: _last(r.curve("eval/accuracy"))),
        Measure("reward_area", "area under the reward curve", _reward_area),
        Measure("length_correct_end", "tokens of correct completions", lambda r: _end(r, "completions/length_correct")),
        Measure(
            "length_incorrect_end", "tokens of incorrect completions", lambda r: _end(r, "completions/length_incorrect")
        ),
        Measure(
            "length_incorrect_change",
            "change of the tokens of incorrect completions",
            lambda r: _end(r, "completions/length_incorrect") - _start(r, "completions/length_incorrect"),
        ),
        Measure("entropy_end", "entropy (nats), last steps", lambda r: _end(r, "policy/entropy")),
        Measure("kl_end", "KL to the reference (nats), last steps", lambda r: _end(r, "policy/kl_ref")),
        Measure("grad_norm_end", "gradient norm, last steps", lambda r: _end(r, "policy/grad_norm")),
        Measure("scale_end", "effective scale, last steps", lambda r: _end(r, "objective/pg_scale")),
        Measure("steps_to", f"steps to a reward of {threshold:.3g}", lambda r: _reach(r, "step", threshold), False),
        Measure(
            "tokens_to", f"tokens to a reward of {threshold:.3g}", lambda r: _reach(r, "tokens/total", threshold), False
        ),
    ]


def default_threshold(results: Sequence[JobResult]) -> float:
    """Half of what the best arm's finished jobs end with; NaN before any has finished."""
    ends: dict[str, list[float]] = {}
    for r in results:
        if r.outcome == "finished":
            ends.setdefault(r.job.arm, []).append(_end(r, "reward/mean"))
    return max(map(_mean, ends.values()), default=math.nan) / 2


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _end(r: JobResult, metric: str) -> float:
    return _mean([value for step, value in r.curve(metric).items() if step > r.step - LAST])


def _start(r: JobResult, metric: str) -> float:
    return _mean([value for step, value in r.curve(metric).items() if step <= LAST])


def _last(curve: Mapping[int, float]) -> float:
    return curve[max(curve)] if curve else math.nan


def _reward_area(r: JobResult) -> float:
    curve = r.curve("reward/mean")
    return area_under(list(curve), list(curve.values()))


def _reach(r: JobResult, x: str, threshold: float) -> float:
    rows = [row for row in r.rows if row["reward/mean"] is not None]
    reached = first_to_reach([row[x] for row in rows], [row["reward/mean"] for row in rows], threshold)
    return math.nan if reached is None else float(reached)


@dataclass(frozen=True)
class Summary:
    """An arm in one measure, over the seeds that have finished."""

    arm: str
    measure: Measure
    values: Mapping[int, float]  # by seed
    estimate: Estimate
    bootstrap: tuple[float, float]
    iqm: float
    comparison: Comparison | None  # None for the baseline and for measures that are not tested


def summarize(results: Sequence[JobResult], plan: Plan, measure: Measure) -> list[Summary]:
    """A summary an arm, in the plan's order."""
    values: dict[str, dict[int, float]] = {arm: {} for arm in plan.arms}
    for r in results:
        if r.outcome == "finished" and math.isfinite(value := measure.of(r)):
            values[r.job.arm][r.job.seed] = value
    compared = {c.arm: c for c in compare(values, plan.baseline)} if measure.tested else {}
    return [
        Summary(
            arm,
            measure,
            by_seed,
            estimate(list(by_seed.values())),
            bootstrap_interval(list(by_seed.values())),
            interquartile_mean(list(by_seed.values())),
            compared.get(arm),
        )
        for arm, by_seed in values.items()
    ]
