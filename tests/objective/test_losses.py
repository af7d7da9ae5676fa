import math

import pytest
import torch

from rlpost.objective.losses import ClippedLoss


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "low", "high"),
    [
        # Inside the bounds: -ratio * A, d/dlogprob = -ratio * A.
        (1.0, 2.0, -2.0, -2.0, False, False),
        (1.1, -1.0, 1.1, 1.1, False, False),
        # Above 1 + 0.28 with A > 0: stopped at -1.28 * A; with A < 0 it still counts.
        (1.5, 2.0, -2.56, 0.0, False, True),
        (1.5, -2.0, 3.0, 3.0, False, False),
        # Below 1 - 0.2 with A < 0: stopped at 0.8; with A > 0 it still counts.
        (0.5, -2.0, 1.6, 0.0, True, False),
        (0.5, 2.0, -1.0, -1.0, False, False),
    ],
)
def test_clipping_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, low: bool, high: bool
) -> None:
    logprobs = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    out = ClippedLoss(eps_low=0.2, eps_high=0.28)(logprobs, old, torch.tensor([advantage], dtype=torch.float64))
    out.loss.sum().backward()
    assert out.loss.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(gradient)
    assert out.ratio.item() == pytest.approx(ratio)
    assert (out.clipped_low.item(), out.clipped_high.item()) == (low, high)


@pytest.mark.parametrize("settings", [{"eps_low": 1.5}, {"eps_low": -0.1}, {"eps_high": -0.1}])
def test_bounds_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        ClippedLoss(**settings)
