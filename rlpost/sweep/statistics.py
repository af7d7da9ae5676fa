"""Statistics of a few seeds: intervals, paired differences, and how many seeds would be needed.

Arms share a seed's prompts and first samples, so their values are compared seed by seed. Everything is SciPy's and
statsmodels'; this file only decides what is asked of them.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
POWER = 0.8
MANY_SEEDS = 1000  # beyond, the number itself says nothing more
MAX_SEEDS = 2**20  # where the search for a needed number of seeds ends
ROUNDING = 1e-12  # of the largest value
MIN_FOR_IQM = 4  # with fewer values the interquartile mean is the mean or the median


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its 95% interval by Student's t; NaN bounds where n is under 2."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and t interval of independent values. One value has no interval; equal ones have one of no width."""
    n = len(values)
    mean = float(np.mean(values)) if n else math.nan
    if n < 2:
        return Estimate(mean, math.nan, math.nan, n)
    if _all_equal(values):
        return Estimate(mean, mean, mean, n)
    interval = stats.ttest_1samp(values, 0).confidence_interval(CONFIDENCE)
    return Estimate(mean, float(interval.low), float(interval.high), n)


def _all_equal(values: Sequence[float]) -> bool:
    """True if values differ by no more than rounding, from which no deviation can be told."""
    return bool(np.ptp(values) <= ROUNDING * np.max(np.abs(values)))


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% bootstrap interval of the mean (BCa), NaN under three values. With few seeds it is too narrow: the t interval
    is the one that conclusions rest on."""
    low, high = bootstrap_intervals(np.asarray(values, dtype=float)[:, None])
    return float(low[0]), float(high[0])


def bootstrap_intervals(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap intervals of the means of many columns at once.

    Args: values [n, K], a row a seed. Returns: low [K] and high [K], NaN where the values of a column are all equal.
    """
    n, columns = values.shape
    low, high = np.full(columns, math.nan), np.full(columns, math.nan)
    varied = np.array([not _all_equal(column) for column in values.T]) if n else np.zeros(columns, bool)
    if n >= 3 and varied.any():
        result = stats.bootstrap(
            (values[:, varied],),
            np.mean,
            confidence_level=CONFIDENCE,
            method="BCa",
            vectorized=True,
            rng=np.random.default_rng(0),
        )
        low[varied], high[varied] = result.confidence_interval
    return low, high


def interquartile_mean(values: Sequence[float]) -> float:
    """Mean of the middle half (Agarwal et al., arXiv:2108.13264); NaN under four values."""
    return float(stats.trim_mean(values, 0.25)) if len(values) >= MIN_FOR_IQM else math.nan


def band(curves: Sequence[Mapping[int, float]]) -> dict[int, Estimate]:
    """An estimate at every step, from one curve (step -> value) a seed. Values that are not finite do not count."""
    steps = sorted({step for curve in curves for step in curve})
    known = {step: [c[step] for c in curves if math.isfinite(c.get(step, math.nan))] for step in steps}
    return {step: estimate(values) for step, values in known.items() if values}


def area_under(steps: Sequence[float], values: Sequence[float]) -> float:
    """Mean height of a curve: its area by the trapezoid rule over the steps it spans. One point is its own height."""
    if len(steps) < 2:
        return float(values[0]) if len(values) else math.nan
    return float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))


def first_to_reach(xs: Sequence[float], values: Sequence[float], threshold: float, window: int = 3) -> float | None:
    """The x (a step, a number of tokens) at which the mean of the last `window` values first reaches the threshold.

    None if it never does.
    """
    for i in range(window - 1, len(values)):
        if np.mean(values[i - window + 1 : i + 1]) >= threshold:
            return xs[i]
    return None


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline arm, over the seeds that both have.

    Attributes:
        differences: arm minus baseline, seed by seed; difference: their mean and interval.
        effect_size: the mean difference over the differences' deviation (Cohen's d of paired values).
        p_value: the paired t test's; p_adjusted: the same by Holm's method over all arms compared.
        p_permutation: the exact sign-flip test's, which assumes nothing of the values' distribution. With n seeds it
            cannot be under 2 / 2^n.
        needed_seeds: the seeds with which a difference like this one is found with a power of 80%; None where there is none
            to find.
    """

    arm: str
    baseline: str
    differences: tuple[float, ...]
    difference: Estimate
    effect_size: float
    p_value: float
    p_adjusted: float = math.nan

    @property
    def p_permutation(self) -> float:
        return _sign_flip(np.array(self.differences)) if len(self.differences) > 1 else math.nan

    @property
    def needed_seeds(self) -> int | None:
        if not math.isfinite(self.effect_size) or self.effect_size == 0:
            return None

        def power(n: int) -> float:
            return float(TTestPower().power(abs(self.effect_size), n, ALPHA))

        enough = 2
        while power(enough) < POWER and enough < MAX_SEEDS:
            enough *= 2
        return bisect.bisect_left(range(enough), POWER, lo=2, key=power)

    @property
    def is_distinguishable(self) -> bool:
        return self.p_adjusted < ALPHA


def compare(arms: Mapping[str, Mapping[int, float]], baseline: str) -> list[Comparison]:
    """Every other arm against the baseline.

    Args: arms: name -> seed -> value; values that are not finite do not count.
    """
    raw = [_compare(name, values, baseline, arms[baseline]) for name, values in arms.items() if name != baseline]
    tested = [c for c in raw if math.isfinite(c.p_value)]
    adjusted: Any = multipletests([c.p_value for c in tested], method="holm")[1] if tested else []
    by_arm = {c.arm: float(p) for c, p in zip(tested, adjusted, strict=True)}
    return [replace(c, p_adjusted=by_arm.get(c.arm, math.nan)) for c in raw]


def _compare(arm: str, values: Mapping[int, float], baseline: str, reference: Mapping[int, float]) -> Comparison:
    seeds = [s for s in sorted(values.keys() & reference.keys()) if math.isfinite(values[s] + reference[s])]
    d = np.array([values[s] - reference[s] for s in seeds])
    difference = estimate(list(d))
    if len(d) < 2:
        return Comparison(arm, baseline, tuple(d), difference, math.nan, math.nan)
    if _all_equal(list(d)):  # the same difference at every seed: certain, or none
        return Comparison(arm, baseline, tuple(d), difference, math.nan, 1.0 if difference.mean == 0 else 0.0)
    tested: Any = stats.ttest_1samp(d, 0)
    p_value = float(tested.pvalue)
    effect_size = difference.mean / float(np.std(d, ddof=1))
    return Comparison(arm, baseline, tuple(d), difference, effect_size, p_value)


def _sign_flip(differences: np.ndarray) -> float:
    """The paired permutation test of a mean difference: exact up to 12 seeds, a sample of the permutations beyond."""

    def mean_difference(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
        return np.mean(x - y, axis=axis)

    return float(
        stats.permutation_test(
            (differences, np.zeros_like(differences)),
            mean_difference,
            permutation_type="samples",
            vectorized=True,
            n_resamples=np.inf if len(differences) <= 12 else 9999,  # pyright: ignore[reportArgumentType] - infinity is all of them, by its manual
            rng=np.random.default_rng(0),
        ).pvalue
    )


def sentence(c: Comparison, what: str) -> str:
    """Sentences on an arm against the baseline."""
    n, d = c.difference.n, c.difference
    if n == 0:
        return f"{c.arm} and {c.baseline} share no finished seed: nothing can be said of {what}."
    if n == 1:
        return (
            f"{c.arm} differs from {c.baseline} by {d.mean:+.3g} in {what} with one seed: no interval exists, so nothing "
            "can be concluded."
        )
    numbers = (
        f"{d.mean:+.3g} (95% interval {d.low:+.3g} to {d.high:+.3g}, {n} seeds, p = {c.p_adjusted:.3g} after Holm)"
    )
    if c.is_distinguishable:
        direction = "higher" if d.mean > 0 else "lower"
        exact = f"; the exact test's p = {c.p_permutation:.3g}, of which {n} seeds allow no less than {2 / 2**n:.3g}"
        return f"{c.arm} is {direction} than {c.baseline} in {what}: {numbers}{exact}."
    more = ""
    if c.needed_seeds:
        count = f"about {c.needed_seeds}" if c.needed_seeds <= MANY_SEEDS else f"more than {MANY_SEEDS}"
        more = f": {count} would be needed for a difference like this one"
    return f"{c.arm} is not distinguishable from {c.baseline} in {what} with {n} seeds{more}: {numbers}."
