"""Estimators of KL(policy || reference) from the tokens the policy sampled (Schulman, joschu.net/blog/kl-approx)."""

import math

import torch
from torch import Tensor

from rlpost.objective.ratios import bounded


def kl_estimate(log_ratios: Tensor, estimator: str, max_log_ratio: float = math.inf) -> Tensor:
    """Per-token estimate, in nats, with d = logprob - ref_logprob.

    k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, low variance; its gradient is the KL's),
    k3 = exp(-d) - 1 + d (unbiased, never negative; GRPO's).

    Where d is beyond `max_log_ratio`, k3 is constant: its exponential would be all there is to the step's gradient.

    Args: log_ratios: [T], d with gradient.

    Returns: [T].
    """
    d = log_ratios
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = bounded(d, max_log_ratio)
        return torch.expm1(-d) + d
    raise ValueError(f"the KL estimator must be k1, k2 or k3, not {estimator!r}")
