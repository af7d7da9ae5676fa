"""Ratios of probabilities that stay finite: the only place where a difference of log-probabilities is exponentiated.

A token that carries no gradient must not make one infinite: the backward pass would multiply its 0 by the infinity, and one
NaN spreads to every weight. So masked tokens are neutral before the exponential, not after it, and a log-ratio is bounded.
"""

import math

import torch
from torch import Tensor

from rlpost.types import TokenView


def log_ratio(logprobs: Tensor, others: Tensor, tokens: TokenView) -> Tensor:
    """The difference of two log-probabilities at active tokens.

    Masked tokens have 0 and no gradient, whatever stands there: NaN and infinities too.

    Args: logprobs, others [T]. Returns: [T].
    """
    return torch.where(tokens.loss_mask, logprobs - others, 0.0)


def bounded(log_ratios: Tensor, max_log_ratio: float) -> Tensor:
    """Log-ratios within the bound, and within what the dtype can exponentiate; beyond them there is no gradient.

    A NaN stays one: it says that the run has diverged.
    """
    bound = min(max_log_ratio, math.log(torch.finfo(log_ratios.dtype).max))
    return log_ratios.clamp(-bound, bound)


def ratio_of(log_ratios: Tensor, tokens: TokenView) -> Tensor:
    """The exponential of log-ratios, bounded by `tokens.max_log_ratio`."""
    return torch.exp(bounded(log_ratios, tokens.max_log_ratio))
