"""Sums and means over each sequence's active tokens, and back to the tokens."""

import torch
from torch import Tensor

from rlpost.types import TokenView


def sequence_sum(values: Tensor, tokens: TokenView) -> Tensor:
    """Args: values [T]. Returns: [B], the sum over each sequence's active tokens; 0 where none is."""
    active = torch.where(tokens.loss_mask, values, 0.0)
    return values.new_zeros(len(tokens.active_lengths)).index_add(0, tokens.sequence_index, active)


def sequence_mean(values: Tensor, tokens: TokenView) -> Tensor:
    """Args: values [T]. Returns: [B], the mean over each sequence's active tokens; 0 where none is."""
    return sequence_sum(values, tokens) / tokens.active_lengths.clamp(min=1).to(values.dtype)


def per_token(values: Tensor, tokens: TokenView) -> Tensor:
    """The value of each token's sequence.

    Not values[index]: the gradient of plain indexing adds up repeats in whatever order the threads come.

    Args: values [B]. Returns: [T].
    """
    return values.index_select(0, tokens.sequence_index)
