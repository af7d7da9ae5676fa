"""Each loss: value, gradient and clip flags worked out by hand."""

import math

import pytest
import torch

from rlpost.objective.losses import (
    CISPOLoss,
    ClippedLoss,
    GSPOLoss,
    Loss,
    ReinforceLoss,
    SAPOLoss,
    TokenLoss,
)
from tests.objective.helpers import doubles, view


def one(loss: Loss, ratio: float, advantage: float) -> tuple[TokenLoss, float]:
    """The loss of one token with logprob -1 and the given ratio, and its gradient by the logprob."""
    logprobs = doubles(-1.0).requires_grad_()
    out = loss(logprobs, doubles(-1.0 - math.log(ratio)), doubles(advantage), view([1]))
    out.loss.sum().backward()
    return out, logprobs.grad.item()


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
def test_clipped(ratio: float, advantage: float, loss: float, gradient: float, low: bool, high: bool) -> None:
    out, grad = one(ClippedLoss(eps_low=0.2, eps_high=0.28), ratio, advantage)
    assert out.loss.item() == pytest.approx(loss)
    assert grad == pytest.approx(gradient)
    assert out.ratio.item() == pytest.approx(ratio)
    assert (out.clipped_low.item(), out.clipped_high.item()) == (low, high)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "high"),
    [
        (2.0, -1.0, 2.0, 2.0, False),  # under dual_clip * |A| = 3
        (5.0, -1.0, 3.0, 0.0, True),  # stopped at it
        (5.0, -0.5, 1.5, 0.0, True),
        (3.5, 0.5, -0.6, 0.0, True),  # not for A > 0, however small
        (5.0, 1.0, -1.2, 0.0, True),  # the usual upper bound
    ],
)
def test_dual_clip(ratio: float, advantage: float, loss: float, gradient: float, high: bool) -> None:
    out, grad = one(ClippedLoss(dual_clip=3.0), ratio, advantage)
    assert (out.loss.item(), grad, out.clipped_high.item()) == (pytest.approx(loss), pytest.approx(gradient), high)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "high"),
    [
        (2.0, -1.0, 2.0, 2.0, False),
        (9.0, -1.0, 4.0, 0.0, True),  # min(4, ...) of the unclipped term
        (9.0, -0.5, 2.0, 0.0, True),
        (0.5, 1.0, -0.5, -0.5, False),
    ],
)
def test_ratio_cap(ratio: float, advantage: float, loss: float, gradient: float, high: bool) -> None:
    out, grad = one(ClippedLoss(ratio_cap=4.0), ratio, advantage)
    assert (out.loss.item(), grad, out.clipped_high.item()) == (pytest.approx(loss), pytest.approx(gradient), high)


def test_gspo_takes_the_mean_of_log_ratios_over_active_tokens() -> None:
    """Log ratios 0.2 and 0.4 (and a masked 9): s = exp(0.3); each token's loss is -s A, the gradient s / 2 a token."""
    old = doubles(-1.0, -1.0, -1.0, -2.0)
    logprobs = (old + doubles(0.2, 0.4, 9.0, 0.0)).requires_grad_()
    tokens = view([3, 1], masked=[(0, 2)])
    out = GSPOLoss(0.5, 0.5)(logprobs, old, doubles(1.0, 1.0, 1.0, 2.0), tokens)
    s = math.exp(0.3)
    assert out.loss.tolist() == pytest.approx([-s, -s, -s, -2.0])
    assert out.ratio.tolist() == pytest.approx([s, s, s, 1.0])
    (out.loss[:2].sum() / 2).backward()  # what the sequence mean makes of it: -s, not -2 s
    assert logprobs.grad.tolist() == pytest.approx([-s / 2, -s / 2, 0.0, 0.0])


def test_gspo_clips_whole_sequences() -> None:
    old = doubles(-1.0, -1.0)
    out = GSPOLoss(3e-4, 4e-4)(old + doubles(0.1, 0.1), old, doubles(1.0, 1.0), view([2]))
    assert out.loss.tolist() == pytest.approx([-1.0004, -1.0004])
    assert out.clipped_high.tolist() == [True, True]
    out = GSPOLoss(3e-4, 4e-4)(old - doubles(0.1, 0.1), old, doubles(-1.0, -1.0), view([2]))
    assert out.clipped_low.tolist() == [True, True]


def test_gspo_token_has_the_same_value_and_a_tokens_own_gradient() -> None:
    old = doubles(-1.0, -1.0)
    logprobs = (old + doubles(0.2, 0.4)).requires_grad_()
    out = GSPOLoss(0.5, 0.5, variant="token")(logprobs, old, doubles(1.0, 3.0), view([2]))
    s = math.exp(0.3)
    assert out.loss.tolist() == pytest.approx([-s, -3 * s])
    out.loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-s, -3 * s])


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "low", "high"),
    [
        (1.6, 2.0, 1.6, False, False),
        (1.2, 2.0, 1.2, False, False),
        (5.5, 2.0, 5.0, False, True),
        (7.0, 2.0, 5.0, False, True),
        (7.0, -2.0, 5.0, False, True),
        (0.3, 1.0, 0.5, True, False),
    ],
)
def test_cispo_bounds_the_weight_and_keeps_the_gradient(
    ratio: float, advantage: float, weight: float, low: bool, high: bool
) -> None:
    out, grad = one(CISPOLoss(eps_low=0.5, eps_high=4.0), ratio, advantage)
    assert out.loss.item() == pytest.approx(weight * advantage)  # -w * A * logprob with logprob -1
    assert grad == pytest.approx(-weight * advantage)
    assert (out.clipped_low.item(), out.clipped_high.item()) == (low, high)


@pytest.mark.parametrize(("ratio", "advantage", "tau"), [(1.0, 2.0, 1.0), (1.7, 0.5, 1.0), (0.4, -1.0, 2.0)])
def test_sapo(ratio: float, advantage: float, tau: float) -> None:
    out, grad = one(SAPOLoss(tau_positive=1.0, tau_negative=2.0), ratio, advantage)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert out.loss.item() == pytest.approx(-4 / tau * gate * advantage)
    assert grad == pytest.approx(-4 * gate * (1 - gate) * ratio * advantage)
    if ratio == 1.0:
        assert grad == pytest.approx(-advantage)  # REINFORCE's


def test_reinforce() -> None:
    out, grad = one(ReinforceLoss(), 3.0, 2.0)
    assert (out.loss.item(), grad, out.ratio.item()) == (2.0, -2.0, pytest.approx(3.0))


LOSSES = [ClippedLoss(), ClippedLoss(dual_clip=3.0, ratio_cap=4.0), GSPOLoss(), GSPOLoss(variant="token")]
LOSSES += [CISPOLoss(), SAPOLoss(), ReinforceLoss()]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_on_policy_every_loss_has_the_policy_gradient(loss: Loss) -> None:
    """At ratio 1 the gradient of each sequence's token mean is -A / len a token, for every loss."""
    logprobs = doubles(-1.0, -2.0, -0.5).requires_grad_()
    advantages = doubles(2.0, 2.0, -1.0)
    out = loss(logprobs, logprobs.detach(), advantages, view([2, 1]))
    (out.loss * doubles(0.5, 0.5, 1.0)).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.0, -1.0, 1.0])
    assert not out.clipped_low.any()
    assert not out.clipped_high.any()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ClippedLoss(eps_low=1.5), "eps_low"),
        (lambda: ClippedLoss(eps_low=-0.1), "eps_low"),
        (lambda: ClippedLoss(eps_high=-0.1), "eps_high"),
        (lambda: ClippedLoss(eps_high=math.inf), "eps_high"),
        (lambda: ClippedLoss(dual_clip=1.0), "dual_clip"),
        (lambda: ClippedLoss(eps_high=0.3, ratio_cap=1.3), r"ratio_cap must be over 1 \+ eps_high = 1\.3"),
        (lambda: GSPOLoss(eps_low=-1), "eps_low"),
        (lambda: GSPOLoss(variant="word"), "variant"),
        (lambda: CISPOLoss(eps_high=-1), "eps_high"),
        (lambda: SAPOLoss(tau_positive=0), "tau_positive"),
        (lambda: SAPOLoss(tau_negative=0), "tau_negative"),
    ],
)
def test_settings_are_checked(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClippedLoss(eps_low=0, eps_high=0),
        lambda: ClippedLoss(eps_low=1),
        lambda: ClippedLoss(dual_clip=1.01),
        lambda: ClippedLoss(eps_high=0.2, ratio_cap=1.21),
        lambda: SAPOLoss(tau_positive=0.1, tau_negative=0.1),
        lambda: CISPOLoss(eps_low=0, eps_high=0),
    ],
)
def test_the_edges_are_allowed(make: object) -> None:
    assert make()


def test_the_ratio_carries_no_gradient() -> None:
    for loss in LOSSES:
        out = loss(doubles(-1.0).requires_grad_(), doubles(-1.2), doubles(1.0), view([1]))
        assert not out.ratio.requires_grad
        assert isinstance(out.loss, torch.Tensor)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_without_an_advantage_nothing_is_clipped_and_nothing_lost(loss: Loss) -> None:
    """Ratios far out on both sides with advantage 0: no loss, no gradient, and no flag but CISPO's, whose bounds hold."""
    logprobs = doubles(-1.0, -9.0).requires_grad_()
    out = loss(logprobs, doubles(-9.0, -1.0), doubles(0.0, 0.0), view([1, 1]))
    out.loss.sum().backward()
    assert out.loss.tolist() == [0.0, 0.0]
    assert logprobs.grad.tolist() == [0.0, 0.0]
    if not isinstance(loss, CISPOLoss):
        assert not out.clipped_low.any()
        assert not out.clipped_high.any()


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_flags_are_booleans_and_float32_stays_float32(loss: Loss) -> None:
    out = loss(doubles(-1.0).float(), doubles(-1.2).float(), doubles(0.5).float(), view([1]))
    assert (out.clipped_low.dtype, out.clipped_high.dtype) == (torch.bool, torch.bool)
    assert (out.loss.dtype, out.ratio.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    "loss",
    [ClippedLoss(), ClippedLoss(dual_clip=3.0, ratio_cap=4.0), GSPOLoss(), CISPOLoss(), SAPOLoss(), ReinforceLoss()],
)
def test_a_loss_that_says_so_gives_an_advantage_of_zero_no_gradient(loss: Loss) -> None:
    """To the bit, whatever the ratio: sequences without an advantage need no backward pass."""
    assert loss.zero_at_zero_advantage
    logprobs = (-3 * torch.rand(6, dtype=torch.float64)).requires_grad_()
    old = torch.tensor([-0.1, -1.0, -2.0, -3.0, -4.0, -5.0], dtype=torch.float64)
    out = loss(logprobs, old, torch.zeros(6, dtype=torch.float64), view([4, 2]))
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
    assert not gradient.any()


def test_sapos_temperatures_are_not_rounded_to_float32() -> None:
    """loss = -(4 / tau) sigmoid(tau (ratio - 1)) A in float64, with temperatures that float32 cannot hold."""
    logprobs = torch.tensor([-0.9, -0.9], dtype=torch.float64)
    old, advantages = torch.full((2,), -1.0, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    found = SAPOLoss(1.1, 1.3)(logprobs, old, advantages, view([1, 1])).loss

    def expected(tau: float, advantage: float) -> float:
        return -(4 / tau) / (1 + math.exp(-tau * (math.exp(0.1) - 1))) * advantage

    assert found.tolist() == pytest.approx([expected(1.1, 1.0), expected(1.3, -1.0)], rel=1e-14)
