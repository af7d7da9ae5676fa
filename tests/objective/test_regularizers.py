import math

import pytest
import torch

from rlpost.objective.regularizers import kl_estimate

LN2 = math.log(2)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # d = ln 2, the policy twice as likely as the reference.
        ("k1", LN2, 1.0),
        ("k2", LN2**2 / 2, LN2),
        ("k3", 0.5 - 1 + LN2, 0.5),  # exp(-d) - 1 + d; derivative 1 - exp(-d)
    ],
)
def test_by_hand(estimator: str, value: float, gradient: float) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(logprobs - torch.tensor([-1.0 - LN2], dtype=torch.float64), estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value)
    assert logprobs.grad.item() == pytest.approx(gradient)


def test_expectations_are_the_divergence() -> None:
    """Over the policy's own distribution, k1 and k3 average to KL(p || q), exactly."""
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    divergence = (p * (p / q).log()).sum().item()
    for estimator in ("k1", "k3"):
        assert (p * kl_estimate(p.log() - q.log(), estimator)).sum().item() == pytest.approx(divergence)


def test_k3_is_precise_near_zero() -> None:
    d = 1e-6
    kl = kl_estimate(torch.tensor([d], dtype=torch.float64), "k3")
    assert kl.item() == pytest.approx(d * d / 2, rel=1e-3)


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(torch.zeros(1), "k4")


def test_beyond_the_bound_k3_is_constant() -> None:
    """exp(20) - 1 - 20, with no gradient, however far the policy is below the reference; within it nothing changes."""
    d = torch.tensor([-20.0, -25.0, -1e4, 3.0], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(d, "k3", max_log_ratio=20.0)
    kl.sum().backward()
    far = math.exp(20) - 21
    assert kl.tolist() == pytest.approx([far, far, far, math.exp(-3) - 1 + 3])
    assert d.grad.tolist() == pytest.approx([1 - math.exp(20), 0, 0, 1 - math.exp(-3)])
