"""A reducer with the Miles framework's signature: each sequence's token losses over a constant (Dr. GRPO).

rlpost reducer=function reducer.path=docs/examples/miles_reducer.py:get_pg_loss_reducer plugins.allow=[miles_reducer]
"""

from collections.abc import Callable

import torch

DIVISOR = 1000.0


def get_pg_loss_reducer(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[torch.Tensor],
    calculate_per_token_loss: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from the sequences' concatenated token losses, [sum(response_lengths)], to their reduced sum."""

    def reduce(token_losses: torch.Tensor) -> torch.Tensor:
        per_sequence = token_losses.split(response_lengths)
        sums = [(losses * mask).sum() for losses, mask in zip(per_sequence, loss_masks, strict=True)]
        return torch.stack(sums).sum() / (1.0 if calculate_per_token_loss else DIVISOR)

    return reduce
