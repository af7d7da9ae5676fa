"""Estimators of KL(policy || reference) from the tokens the policy sampled (Schulman, joschu.net/blog/kl-approx)."""

import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate, in nats, with d = logprob - ref_logprob.

    k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, low variance; its gradient is the KL's),
    k3 = exp(-d) - 1 + d (unbiased, never negative; GRPO's).

    Args: logprobs [T] with gradient, ref_logprobs [T]. Returns: [T].
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"the KL estimator must be k1, k2 or k3, not {estimator!r}")
