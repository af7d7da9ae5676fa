"""Worked values, edge cases, and the intervals' coverage by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from rlpost.sweep.statistics import (
    area_under,
    band,
    bootstrap_interval,
    bootstrap_intervals,
    compare,
    estimate,
    first_to_reach,
    interquartile_mean,
    sentence,
)


def test_the_t_interval_by_hand() -> None:
    """1, 2, 3: mean 2, standard error 1/sqrt(3), t(0.975; 2) = 4.30265."""
    e = estimate([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert (e.mean, e.low, e.high, e.n) == pytest.approx((2, 2 - half, 2 + half, 3))


def test_one_seed_has_no_interval_and_equal_ones_no_width() -> None:
    assert not estimate([0.5]).has_interval
    assert estimate([0.5]).mean == 0.5
    assert (estimate([0.5, 0.5]).low, estimate([0.5, 0.5]).high) == (0.5, 0.5)
    assert math.isnan(estimate([]).mean)
    assert all(math.isnan(b) for b in bootstrap_interval([1.0, 2.0]))


def test_values_that_differ_by_rounding_alone_are_equal() -> None:
    values = [0.1 + 0.2, 0.3, 0.3]
    assert (estimate(values).low, estimate(values).high) == (estimate(values).mean, estimate(values).mean)
    assert all(math.isnan(b) for b in bootstrap_interval(values))
    (c,) = compare({"a": {0: 1.1, 1: 2.1, 2: 3.1}, "b": {0: 1.0, 1: 2.0, 2: 3.0}}, "b")
    assert math.isnan(c.effect_size)
    assert c.p_value == 0


def test_bootstrap_intervals_of_columns_are_those_of_each() -> None:
    values = np.random.default_rng(0).normal(size=(4, 3))
    values[:, 1] = 0.5
    low, high = bootstrap_intervals(values)
    assert math.isnan(low[1])
    for column in (0, 2):
        assert values[:, column].min() <= low[column] < values[:, column].mean() < high[column]


def test_the_bootstrap_interval_holds_the_mean_and_repeats() -> None:
    values = [0.1, 0.4, 0.5, 0.55, 0.9, 0.7]
    low, high = bootstrap_interval(values)
    assert min(values) < low < np.mean(values) < high < max(values)
    assert bootstrap_interval(values) == (low, high)


def test_interquartile_mean_by_hand() -> None:
    assert interquartile_mean([0, 1, 2, 100]) == 1.5
    assert math.isnan(interquartile_mean([1, 2, 3]))


def test_curves() -> None:
    estimates = band([{0: 1.0, 5: 2.0, 10: 3.0}, {0: 3.0, 5: math.nan}])
    assert {step: (e.mean, e.n) for step, e in estimates.items()} == {0: (2.0, 2), 5: (2.0, 1), 10: (3.0, 1)}
    assert area_under([1, 2, 4], [0.0, 1.0, 1.0]) == pytest.approx(2.5 / 3)
    assert area_under([5], [0.3]) == 0.3
    assert first_to_reach([10, 20, 30, 40], [0, 1, 1, 1], 0.6) == 30
    assert first_to_reach([10, 20, 30], [0, 0, 1], 0.6) is None
    assert first_to_reach([10, 20], [1, 1], 0.6, window=1) == 10


def test_a_comparison_by_hand() -> None:
    """Differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.464, p = 0.0742; sign flips: 2 of 8 as extreme."""
    arms = {"base": {0: 0.0, 1: 0.0, 2: 0.0, 3: 9.0}, "arm": {0: 1.0, 1: 2.0, 2: 3.0, 4: 9.0}}
    (c,) = compare(arms, "base")
    assert c.difference.n == 3
    assert c.difference.mean == pytest.approx(2.0)
    assert c.effect_size == pytest.approx(2.0)
    assert c.p_value == pytest.approx(0.0741799, rel=1e-4)
    assert c.p_permutation == pytest.approx(0.25)
    assert c.p_adjusted == c.p_value
    assert not c.is_distinguishable
    assert c.needed_seeds == 5  # power 0.8 at d = 2 needs between 4 and 5


def test_holm_over_three_arms() -> None:
    generator = np.random.default_rng(0)
    base = dict.fromkeys(range(8), 0.0)
    arms = {"base": base, **{f"a{i}": {s: generator.normal(i / 2) for s in range(8)} for i in range(3)}}
    comparisons = compare(arms, "base")
    raw = sorted(c.p_value for c in comparisons)
    smallest = min(comparisons, key=lambda c: c.p_value)
    assert smallest.p_adjusted == pytest.approx(3 * raw[0])
    assert all(c.p_adjusted >= c.p_value for c in comparisons)


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ({5: 1.0}, "share no finished seed"),
        ({0: 1.0}, "with one seed: no interval exists"),
        ({0: math.nan, 1: 0.5}, "with one seed"),
        ({0: 0.1, 1: 0.3, 2: -0.1}, "is not distinguishable from base in reward with 3 seeds: about"),
        ({0: 1.0, 1: 1.01, 2: 0.99}, "arm is higher than base in reward"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "arm is higher than base in reward"),
        ({0: 0.0, 1: 0.0, 2: 0.0}, "is not distinguishable from base in reward with 3 seeds: +0"),
    ],
)
def test_sentences_say_what_can_be_said(arm: dict[int, float], expected: str) -> None:
    (c,) = compare({"base": {0: 0.0, 1: 0.0, 2: 0.0}, "arm": arm}, "base")
    assert expected in sentence(c, "reward")


def synthetic(n: int, difference: float, count: int) -> np.ndarray:
    """Differences arm - baseline of `count` sweeps of n seeds. A seed's luck is shared by its arms and so cancels."""
    generator = np.random.default_rng(n)
    luck = generator.normal(0, 0.1, (count, n))
    arm, base = (luck + generator.normal(0, 0.05, (count, n)) for _ in range(2))
    return arm + difference - base


@pytest.mark.parametrize("n", [3, 5, 8])
@pytest.mark.parametrize("difference", [0.0, 0.2])
def test_intervals_cover_and_false_alarms_are_rare(n: int, difference: float) -> None:
    """Over 20000 synthetic sweeps; the first are put through compare() itself, which must say the same."""
    differences = synthetic(n, difference, 20_000)
    result = stats.ttest_1samp(differences, 0, axis=1)
    interval = result.confidence_interval(0.95)
    for row in range(2):
        (c,) = compare({"base": dict.fromkeys(range(n), 0.0), "arm": dict(enumerate(differences[row]))}, "base")
        assert (c.difference.low, c.difference.high) == pytest.approx((interval.low[row], interval.high[row]))
        assert c.is_distinguishable == (result.pvalue[row] < 0.05)
    coverage = np.mean((interval.low <= difference) & (difference <= interval.high))
    found = np.mean(result.pvalue < 0.05)
    assert 0.92 <= coverage <= 0.98
    if difference:
        assert found > {3: 0.4, 5: 0.9, 8: 0.99}[n]
    else:
        assert found <= 0.06
