import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpost.objective.advantages import (
    Advantage,
    BetaNormalized,
    GroupAdvantage,
    LeaveOneOut,
    RawReward,
    ReinforcePlusPlus,
    Stateful,
    normalize_then_sum,
)


def advantages(advantage: Advantage, rewards: list[float], groups: list[int]) -> list[float]:
    return advantage(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)).tolist()


NONE = GroupAdvantage(normalize="none")


def test_group_std_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, sample deviation sqrt(4 * 1/4 / 3) = 1/sqrt(3)."""
    expected = 0.5 / (1 / math.sqrt(3) + 1e-4)
    assert advantages(GroupAdvantage(), [1, 0, 0, 1], [0] * 4) == pytest.approx(
        [expected, -expected, -expected, expected]
    )


def test_without_std_by_hand() -> None:
    assert advantages(NONE, [3, 0, 0], [7] * 3) == pytest.approx([2, -1, -1])


def test_batch_std_by_hand() -> None:
    """Rewards 1, 0 | 3, 3: deviations from group means 1/2, -1/2 | 0, 0; all rewards' sample deviation is 1.5."""
    expected = 0.5 / (1.5 + 1e-4)
    assert advantages(GroupAdvantage(normalize="batch"), [1, 0, 3, 3], [0, 0, 1, 1]) == pytest.approx(
        [expected, -expected, 0, 0]
    )


def test_batch_std_of_two() -> None:
    std = math.sqrt(0.5)
    assert advantages(GroupAdvantage(normalize="batch", eps=0), [1, 0], [0, 0]) == pytest.approx(
        [0.5 / std, -0.5 / std]
    )


def test_leave_one_out_by_hand() -> None:
    """3 against the mean of 0 and 0; 0 against the mean of 3 and 0."""
    assert advantages(LeaveOneOut(), [3, 0, 0], [0] * 3) == pytest.approx([3, -1.5, -1.5])


def test_reinforce_plus_plus_by_hand() -> None:
    """Group means off: 1, -1 | 2, -2; mean 0, sample deviation sqrt(10 / 3)."""
    std = math.sqrt(10 / 3)
    assert advantages(ReinforcePlusPlus(), [2, 0, 4, 0], [0, 0, 1, 1]) == pytest.approx(
        [1 / std, -1 / std, 2 / std, -2 / std]
    )


def test_reinforce_plus_plus_has_its_eps_beside_the_deviation() -> None:
    values = advantages(ReinforcePlusPlus(eps=1.0), [2, 0, 4, 0], [0, 0, 1, 1])
    assert values[2] == pytest.approx(2 / (math.sqrt(10 / 3) + 1))


def test_raw_reward_by_hand() -> None:
    assert advantages(RawReward(), [1, 3], [0, 1]) == [1, 3]
    assert advantages(RawReward(centre=True), [1, 3, math.nan], [0, 1, 1]) == [-1, 1, 0]


def beta_density(p: float, a: float, b: float) -> float:
    return math.gamma(a + b) / math.gamma(a) / math.gamma(b) * p ** (a - 1) * (1 - p) ** (b - 1)


def test_beta_normalisation_by_hand() -> None:
    """Success rates 1/4 and 3/4: mean 1/2, variance 1/16, so a + b = (1/4) / (1/16) - 1 = 3, alpha = beta = 1 + 1.5/3."""
    advantage = BetaNormalized()
    values = advantages(advantage, [1, 0, 0, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4)
    assert [p.item() for p in advantage.parameters()] == pytest.approx([1.5, 1.5])
    density = beta_density(0.25, 1.5, 1.5)
    expected = [0.75 / density] + [-0.25 / density] * 3 + [0.25 / density] * 3 + [-0.75 / density]
    assert values == pytest.approx(expected)


def test_beta_normalisation_has_reinforce_and_grpo_as_special_cases() -> None:
    rewards, groups = [1, 0, 0, 0, 1, 1, 1, 0, 1, 0], [0] * 4 + [1] * 4 + [2] * 2
    reinforce = advantages(BetaNormalized(alpha=1.0, beta=1.0), rewards, groups)
    assert reinforce == pytest.approx(advantages(NONE, rewards, groups))
    grpo_like = advantages(BetaNormalized(alpha=1.5, beta=1.5), rewards, groups)
    # GRPO with the population deviation sqrt(p (1 - p)); the density is 8 / pi times that.
    grpo = []
    for reward, p in zip(rewards, [0.25] * 4 + [0.75] * 4 + [0.5] * 2, strict=True):
        grpo.append((reward - p) / math.sqrt(p * (1 - p)) * math.pi / 8)
    assert grpo_like == pytest.approx(grpo)


def test_beta_normalisation_maps_rewards_and_refuses_others() -> None:
    mapped = advantages(BetaNormalized(low=-1, high=1, alpha=1.0, beta=1.0), [1, -1, -1, -1], [0] * 4)
    assert mapped == pytest.approx([0.75, -0.25, -0.25, -0.25])
    with pytest.raises(ValueError, match=r"outside algorithm.advantage.low\.\.high = 0\.\.1"):
        advantages(BetaNormalized(), [1, -1], [0, 0])


def test_beta_normalisation_bounds_its_weights() -> None:
    rewards = [1] + [0] * 9
    values = advantages(BetaNormalized(alpha=1.0, beta=50.0, max_weight=2.0), rewards, [0] * 10)
    assert values[0] == pytest.approx(0.9 * min(2.0, 1 / beta_density(0.1, 1, 50)))
    assert advantages(BetaNormalized(alpha=50.0, beta=1.0, max_weight=2.0), rewards, [0] * 10)[0] == pytest.approx(1.8)


def test_beta_normalisation_remembers_a_window_and_its_state() -> None:
    advantage = BetaNormalized(window=2)
    for rewards in ([1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]):
        advantages(advantage, rewards, [0] * 4)
    assert advantage.state_dict() == {"rates": [[0.75], [0.5]]}
    restored = BetaNormalized(window=2)
    restored.load_state_dict(advantage.state_dict())
    assert advantages(restored, [1, 0], [0, 0]) == advantages(advantage, [1, 0], [0, 0])
    assert isinstance(advantage, Stateful)
    assert not isinstance(NONE, Stateful)


@pytest.mark.parametrize("rates", [[0.5, 0.5], [0.0, 1.0], [1.0, 1.0], [0.5]])
def test_beta_normalisation_without_a_fit_is_reinforce(rates: list[float]) -> None:
    advantage = BetaNormalized()
    advantage.load_state_dict({"rates": [rates]})
    assert [p.item() for p in advantage.parameters()] == [1.0, 1.0]


def test_beta_normalisation_before_any_step_and_at_its_edges() -> None:
    fresh = BetaNormalized(window=1, max_weight=0.5)
    assert [p.item() for p in fresh.parameters()] == [1.0, 1.0]
    assert all(p.dtype == torch.float64 for p in fresh.parameters())
    # A group without variation does not end the others' turn; every weight is bounded by 0.5.
    assert advantages(fresh, [1, 1, 1, 0], [0, 0, 1, 1]) == pytest.approx([0, 0, 0.25, -0.25])


ADVANTAGES = [GroupAdvantage(), GroupAdvantage("batch"), NONE, LeaveOneOut(), ReinforcePlusPlus()]


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [5.0], [1e9, 1e9], [math.nan, 3.0], [math.nan, math.nan]])
@pytest.mark.parametrize("advantage", ADVANTAGES, ids=repr)
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(advantage: Advantage, rewards: list[float]) -> None:
    assert advantages(advantage, rewards, [0] * len(rewards)) == [0.0] * len(rewards)


@pytest.mark.parametrize("rewards", [[0.25, 0.25, 0.25], [1.0], [math.nan, 1.0], [math.nan, math.nan]])
def test_so_does_beta_normalisation(rewards: list[float]) -> None:
    assert advantages(BetaNormalized(), rewards, [0] * len(rewards)) == [0.0] * len(rewards)


def test_almost_equal_rewards_are_not_blown_up() -> None:
    """1.00000 and 1.00001: deviations of 5e-6 over a deviation of 7e-6 + 1e-4 stay small."""
    values = advantages(GroupAdvantage(), [1.0, 1.00001], [0, 0])
    assert values == pytest.approx(
        [-5e-6 / (1.00001e-5 / math.sqrt(2) + 1e-4), 5e-6 / (1e-5 / math.sqrt(2) + 1e-4)], rel=1e-4
    )
    assert max(values) < 0.05


@pytest.mark.parametrize("advantage", [*ADVANTAGES, RawReward(), BetaNormalized()], ids=repr)
def test_nan_is_left_out_of_the_baseline(advantage: Advantage) -> None:
    """A row to which no function applies has advantage 0 and changes nobody else's."""
    with_nan = advantages(advantage, [1.0, math.nan, 0.0, 1.0, 0.0, 0.0], [0, 0, 0, 1, 1, 1])
    fresh = type(advantage)() if isinstance(advantage, BetaNormalized) else advantage
    without = advantages(fresh, [1.0, 0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 1])
    assert with_nan[1] == 0.0
    assert with_nan[:1] + with_nan[2:] == pytest.approx(without)


@pytest.mark.parametrize("advantage", [*ADVANTAGES, RawReward()], ids=repr)
@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 2)), min_size=1, max_size=9), st.randoms())
def test_order_does_not_matter_and_all_is_finite(
    advantage: Advantage, rows: list[tuple[float, int]], random: object
) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    straight = advantages(advantage, *map(list, zip(*rows, strict=True)))
    shuffled = advantages(advantage, *map(list, zip(*(rows[i] for i in order), strict=True)))
    assert [straight[i] for i in order] == pytest.approx(shuffled, abs=1e-6)
    assert all(map(math.isfinite, straight))
    if not isinstance(advantage, RawReward):
        assert sum(straight) == pytest.approx(0, abs=1e-4)


def test_normalize_then_sum_by_hand() -> None:
    """Two functions of very different size count alike once each is normalised; the sum is normalised over the step."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1000.0], [0.0, math.nan]], dtype=torch.float64)
    values = normalize_then_sum(GroupAdvantage(eps=0), rewards, [1.0, 0.5], torch.zeros(3, dtype=torch.int64))
    first = [2 / 3 / math.sqrt(1 / 3), -1 / 3 / math.sqrt(1 / 3)]
    second = 1 / math.sqrt(2)
    summed = [first[0] - 0.5 * second, first[1] + 0.5 * second, first[1]]
    mean, deviation = sum(summed) / 3, statistics.stdev(summed)
    assert values.tolist() == pytest.approx([(s - mean) / (deviation + 1e-4) for s in summed])
    with pytest.raises(ValueError, match="BetaNormalized keeps one history"):
        normalize_then_sum(BetaNormalized(), rewards, [1, 1], torch.zeros(3, dtype=torch.int64))


def test_normalize_then_sum_over_several_groups() -> None:
    """Each group's own sums are (1, -1) / sqrt 2 times one and two functions; a row that no function applies to is out."""
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 5.0], [0.0, 5.0], [math.nan, math.nan]], dtype=torch.float64)
    values = normalize_then_sum(GroupAdvantage(eps=0), rewards, [1.0, 1.0], torch.tensor([0, 0, 1, 1, 1]))
    half = 1 / math.sqrt(2)
    summed = [2 * half, -2 * half, half, -half]
    deviation = statistics.stdev(summed)
    assert values.tolist() == pytest.approx([*(s / (deviation + 1e-4) for s in summed), 0.0])
    equal = normalize_then_sum(GroupAdvantage(), torch.ones(4, 2), [1.0, 1.0], torch.tensor([0, 0, 1, 1]))
    assert equal.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: GroupAdvantage(normalize="batsh"), "normalize"),
        (lambda: GroupAdvantage(eps=-1), "eps"),
        (lambda: ReinforcePlusPlus(eps=math.nan), "eps"),
        (lambda: BetaNormalized(low=1, high=1), "low=1"),
        (lambda: BetaNormalized(window=0), "window"),
        (lambda: BetaNormalized(max_weight=0), "max_weight"),
        (lambda: BetaNormalized(alpha=1.0), "^alpha and beta are set together"),
        (lambda: BetaNormalized(alpha=0.5, beta=1.0), "at least 1"),
        (lambda: BetaNormalized(alpha=1.0, beta=0.5), "at least 1"),
    ],
)
def test_a_wrong_setting_is_named(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
