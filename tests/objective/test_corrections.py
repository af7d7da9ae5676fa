"""Corrections by hand: multipliers, what is cut, and logprobs that overflow or are missing."""

import math

import pytest

from rlpost.objective.corrections import ImportanceSampling, OffPolicySequenceMask
from tests.objective.helpers import doubles, view

LN2, LN3 = math.log(2), math.log(3)
ZERO = doubles(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "multiplier", "cut"),
    [
        # log w = ln 3, -ln 2 in the first sequence; ln 2 in the second. w = 3, 1/2, 2.
        ({"high": 2.5}, [2.5, 0.5, 2], [True, False, False]),
        ({"low": 0.75, "high": 4.0}, [3, 0.75, 2], [False, True, False]),
        ({"mode": "mask", "high": 2.5}, [0, 0.5, 2], [True, False, False]),
        ({"mode": "mask", "low": 0.75, "high": 4.0}, [3, 0, 2], [False, True, False]),
        ({"level": "sequence", "high": 10.0}, [1.5, 1.5, 2], [False, False, False]),
        ({"level": "sequence", "mode": "mask", "high": 1.7}, [1.5, 1.5, 0], [False, False, True]),
        ({"level": "geometric", "high": 10.0}, [math.sqrt(1.5), math.sqrt(1.5), 2], [False, False, False]),
        ({"level": "geometric", "high": 1.3}, [math.sqrt(1.5), math.sqrt(1.5), 1.3], [False, False, True]),
    ],
)
def test_importance_sampling(settings: dict[str, object], multiplier: list[float], cut: list[bool]) -> None:
    old, rollout = doubles(-1.0, -1.0, -1.0), doubles(-1 - LN3, -1 + LN2, -1 - LN2)
    out = ImportanceSampling(**settings)(ZERO, old, rollout, ZERO, view([2, 1]))
    assert out.multiplier.tolist() == pytest.approx(multiplier)
    assert out.cut.tolist() == cut


def test_a_masked_token_does_not_count_in_its_sequences_weight() -> None:
    old, rollout = doubles(-1.0, -1.0, -1.0), doubles(-1 - LN2, -50.0, -1.0)
    out = ImportanceSampling(level="sequence", high=5.0)(ZERO, old, rollout, ZERO, view([2, 1], masked=[(0, 1)]))
    assert out.multiplier.tolist() == pytest.approx([2, 2, 1])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_product_over_a_hundred_tokens_does_not_overflow(mode: str, sign: int) -> None:
    old = doubles(*[sign * 20.0] * 100)
    zeros = doubles(*[0.0] * 100)
    out = ImportanceSampling(level="sequence", mode=mode, high=2.0)(zeros, old, zeros, zeros, view([100]))
    expected = (2.0 if mode == "truncate" else 0.0) if sign > 0 else 0.0
    assert out.multiplier.tolist() == [expected if sign > 0 else pytest.approx(0.0, abs=1e-300)] * 100
    assert out.cut.tolist() == [sign > 0] * 100


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_rollout_logprob_that_is_nan_is_cut(level: str, mode: str) -> None:
    rollout = doubles(math.nan, 0.0, 0.0)
    out = ImportanceSampling(level=level, mode=mode)(ZERO, ZERO, rollout, ZERO, view([2, 1]))
    spoilt = [True, level != "token", False]
    assert out.cut.tolist() == spoilt
    assert out.multiplier.tolist() == [0.0 if s else 1.0 for s in spoilt]


@pytest.mark.parametrize(
    ("advantage", "drift", "kept"),
    [
        (-1.0, 0.2, False),
        (-1.0, 0.09, True),
        (1.0, 0.2, True),
        (0.0, 9.0, True),
        (-1.0, -0.5, True),
        (-1.0, math.nan, False),
    ],
)
def test_off_policy_sequence_mask(advantage: float, drift: float, kept: bool) -> None:
    """The mean over two active tokens of rollout - current is `drift`; a third, masked, would change it."""
    logprobs, rollout = doubles(-3.0, -2.0, -1.0), doubles(2 * drift - 3.0, -2.0, 99.0)
    a = doubles(advantage, advantage, advantage)
    out = OffPolicySequenceMask(threshold=0.1)(logprobs, ZERO, rollout, a, view([3], masked=[(0, 2)]))
    assert out.multiplier.tolist() == [float(kept)] * 3
    assert out.cut.tolist() == [not kept] * 3


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ImportanceSampling(level="word"), "level"),
        (lambda: ImportanceSampling(mode="cut"), "mode"),
        (lambda: ImportanceSampling(low=1.5), "low=1.5"),
        (lambda: ImportanceSampling(high=0.5), "high=0.5"),
        (lambda: ImportanceSampling(high=math.inf), "high=inf"),
        (lambda: OffPolicySequenceMask(threshold=-1), "threshold"),
    ],
)
def test_settings_are_checked(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()


def test_the_edges_are_allowed_and_inside() -> None:
    """Bounds of 1 and 1 keep a weight of exactly 1; a threshold of 0 keeps a drift of 0."""
    out = ImportanceSampling(mode="mask", low=1.0, high=1.0)(ZERO, ZERO, ZERO, ZERO, view([3]))
    assert out.multiplier.tolist() == [1.0] * 3
    out = OffPolicySequenceMask(threshold=0)(ZERO, ZERO, ZERO, doubles(-1.0, -1.0, -1.0), view([3]))
    assert out.multiplier.tolist() == [1.0] * 3


def test_float32_stays_float32() -> None:
    logprobs, rollout = ZERO.float(), ZERO
    for correction in (ImportanceSampling(), OffPolicySequenceMask()):
        assert correction(logprobs, logprobs, rollout, logprobs, view([3])).multiplier.dtype == logprobs.dtype
