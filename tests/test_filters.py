import math

import pytest

from rlpost.rollout.filters import SoftOverlongPenalty, VariedRewards
from tests.conftest import make_rollout


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0], False),
        ([0.0], False),
        ([1.0, math.nan], False),
        ([1.0, math.nan, 0.0], True),
        ([math.nan, math.nan], False),
    ],
)
def test_varied_rewards(rewards: list[float], kept: bool) -> None:
    assert VariedRewards()([make_rollout(reward=r) for r in rewards]) is kept


@pytest.mark.parametrize(("length", "penalty"), [(1, 0), (8, 0), (9, 0.5), (10, 1), (12, 1)])
def test_soft_overlong_penalty_by_hand(length: int, penalty: float) -> None:
    """A limit of 10 with its last fifth as the buffer: nothing up to 8, all of it at 10."""
    rollout = make_rollout(completion=[4] * length, reward=2.0)
    assert SoftOverlongPenalty(10, 0.2)([rollout]) == [pytest.approx(2.0 - penalty)]
    assert SoftOverlongPenalty(10, 0.2, weight=0.5)([rollout]) == [pytest.approx(2.0 - penalty / 2)]


def test_a_reward_that_does_not_apply_stays_so() -> None:
    assert math.isnan(SoftOverlongPenalty(10)([make_rollout(reward=math.nan)])[0])


@pytest.mark.parametrize("share", [0, 1.1, -0.5])
def test_the_share_is_checked(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        SoftOverlongPenalty(10, share)
