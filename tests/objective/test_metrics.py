"""Metrics: each kind put together from parts, in any order, and over optimizer steps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpost.objective.metrics import Max, Mean, Min, Sum, joined, over_optimizer_steps

NUMBERS = st.floats(-8, 8).map(lambda x: round(x * 8) / 8)  # whose sums are exact
PARTS = st.lists(
    st.fixed_dictionaries(
        {
            "sum": NUMBERS.map(Sum),
            "mean": st.tuples(NUMBERS, st.integers(1, 4)).map(lambda p: Mean(*p)),
            "max": NUMBERS.map(Max),
            "min": NUMBERS.map(Min),
        }
    ),
    min_size=1,
    max_size=6,
)


def test_each_kind_by_hand() -> None:
    parts = [
        {"loss": Sum(1.5), "length": Mean(6.0, 2), "ratio": Max(1.2), "shortest": Min(4.0)},
        {"loss": Sum(-0.5), "length": Mean(9.0, 1), "ratio": Max(3.0), "shortest": Min(2.0)},
    ]
    values = {name: metric.value for name, metric in joined(parts).items()}
    assert values == {"loss": 1.0, "length": 5.0, "ratio": 3.0, "shortest": 2.0}


def test_over_optimizer_steps_sums_are_averaged_and_the_others_go_on() -> None:
    steps = [
        {"loss": Sum(1.0), "length": Mean(6.0, 2), "ratio": Max(1.0), "shortest": Min(4.0)},
        {"loss": Sum(2.0), "length": Mean(9.0, 1), "ratio": Max(5.0), "shortest": Min(7.0)},
    ]
    assert over_optimizer_steps(steps) == {"loss": 1.5, "length": 5.0, "ratio": 5.0, "shortest": 4.0}


@given(parts=PARTS, order=st.randoms(), cut=st.integers(0, 6))
def test_the_parts_may_come_in_any_order_and_grouping(parts: list, order: object, cut: int) -> None:
    whole = joined(parts)
    order.shuffle(parts)
    halves = [joined(half) for half in (parts[:cut], parts[cut:]) if half]
    assert joined(halves) == whole


def test_tensors_become_numbers_as_they_are_joined() -> None:
    parts = [{"loss": Sum(torch.tensor(0.5))}, {"loss": Sum(torch.tensor(0.25))}]
    assert joined(parts) == {"loss": Sum(0.75)}
    assert joined(parts[:1]) == {"loss": Sum(0.5)}
    assert isinstance(joined(parts[:1])["loss"].total, float)


@pytest.mark.parametrize("kind", [Max, Min])
def test_a_nan_stays(kind: type) -> None:
    for parts in ([1.0, math.nan], [math.nan, 1.0]):
        assert math.isnan(joined({"x": kind(v)} for v in parts)["x"].value)


def test_a_mean_of_nothing_is_nan() -> None:
    assert math.isnan(Mean(0.0, 0.0).value)


def test_a_name_is_one_kind_of_metric() -> None:
    with pytest.raises(TypeError, match="x is a Sum in one part and a Max in another"):
        joined([{"x": Sum(1.0)}, {"x": Max(1.0)}])
