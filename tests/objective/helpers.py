"""Token views by hand."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlpost.types import TokenView


def view(lengths: Sequence[int], masked: Sequence[tuple[int, int]] = (), prompt_length: int = 3) -> TokenView:
    """Whole sequences of the given lengths side by side; `masked` are (sequence, place) pairs without loss."""
    masks = [torch.ones(length, dtype=torch.bool) for length in lengths]
    for sequence, place in masked:
        masks[sequence][place] = False
    return TokenView(
        sequence_index=torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]),
        token_index=torch.cat([torch.arange(n) for n in lengths]),
        loss_mask=torch.cat(masks),
        active_lengths=torch.tensor([int(mask.sum()) for mask in masks]),
        prompt_lengths=[prompt_length] * len(lengths),
        completion_masks=masks,
    )


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
