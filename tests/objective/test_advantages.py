import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpost.objective.advantages import GroupAdvantage


def advantages(rewards: list[float], groups: list[int], **settings: object) -> list[float]:
    return GroupAdvantage(**settings)(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)).tolist()


def test_group_std_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, sample deviation sqrt(4 * 1/4 / 3) = 1/sqrt(3)."""
    expected = 0.5 / (1 / math.sqrt(3) + 1e-4)
    assert advantages([1, 0, 0, 1], [0] * 4) == pytest.approx([expected, -expected, -expected, expected])


def test_without_std_by_hand() -> None:
    assert advantages([3, 0, 0], [7] * 3, normalize="none") == pytest.approx([2, -1, -1])


def test_groups_do_not_touch_and_may_interleave() -> None:
    mixed = advantages([1, 10, 0, 30], [0, 1, 0, 1], normalize="none")
    assert mixed == pytest.approx([0.5, -10, -0.5, 10])


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [5.0], [1e9, 1e9]])
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(rewards: list[float]) -> None:
    assert advantages(rewards, [0] * len(rewards)) == [0.0] * len(rewards)


def test_nan_is_left_out_of_the_baseline() -> None:
    values = advantages([1.0, math.nan, 0.0], [0, 0, 0], normalize="none")
    assert values == pytest.approx([0.5, 0.0, -0.5])


def test_all_nan_is_zero() -> None:
    assert advantages([math.nan, math.nan], [0, 0]) == [0.0, 0.0]


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.randoms())
def test_sums_to_zero_in_any_order(rewards: list[float], random: object) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    straight = advantages(rewards, [3] * len(rewards))
    shuffled = advantages([rewards[i] for i in order], [3] * len(rewards))
    assert sum(straight) == pytest.approx(0, abs=1e-6)
    assert [straight[i] for i in order] == pytest.approx(shuffled, abs=1e-9)


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ValueError, match="normalize"):
        GroupAdvantage(normalize="batsh")
    with pytest.raises(ValueError, match="eps"):
        GroupAdvantage(eps=-1)
