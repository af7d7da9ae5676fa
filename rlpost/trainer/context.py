"""Context parallelism: the positions of a micro-batch's row split over the ranks of a context group.

Everything but attention works on positions alone. Attention sees whole rows, for a part of the heads (Ulysses,
arXiv:2309.14509): `attention.py`. The values of all tokens are gathered afterwards, so the objective never knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlpost import distributed
from rlpost.types import PackedBatch, PackedGroup


@dataclass(frozen=True)
class Share:
    """This rank's part of a micro-batch.

    Attributes:
        row: the whole row, padded to a multiple of the context group's size.
        positions: this rank's positions.
        tokens: [T_here] the completion tokens, by index among the batch's, that are predicted there.
        sizes: T_here of each rank.
        order: [T] each token's index among the ranks' tokens, rank after rank.
    """

    row: PackedBatch
    positions: slice
    tokens: Tensor
    sizes: Sequence[int]
    order: Tensor

    @property
    def predictor_index(self) -> Tensor:
        """[T_here] among this rank's positions."""
        return self.row.predictor_index[self.tokens] - self.positions.start

    @property
    def target_ids(self) -> Tensor:
        return self.row.target_ids[self.tokens]

    def whole(self, values: Tensor) -> Tensor:
        """[T_here] -> [T], in the batch's order."""
        return distributed.gather_tokens(values, self.sizes).index_select(0, self.order)


def share(batch: PackedBatch) -> Share:
    """The share of a shared_prefix row [1, W]; every rank of a context group holds the same batch."""
    size, here = distributed.context_size(), distributed.context_rank()
    row = _padded(batch, size)
    width = row.input_ids.shape[1] // size
    owner = row.predictor_index // width
    by_rank = owner.argsort(stable=True)
    sizes = torch.bincount(owner, minlength=size).tolist()
    return Share(row, slice(here * width, (here + 1) * width), by_rank.split(sizes)[here], sizes, by_rank.argsort())


def _padded(batch: PackedBatch, multiple: int) -> PackedBatch:
    """Padding at the end, which attends to itself."""
    width = batch.input_ids.shape[1]
    missing = -width % multiple
    if not missing:
        return batch
    return replace(
        batch,
        input_ids=pad(batch.input_ids, (0, missing)),
        position_ids=pad(batch.position_ids, (0, missing)),
        groups=[*batch.groups, PackedGroup(width, missing, ())],
        group_index=pad(batch.group_index, (0, missing), value=-1),
        segment_index=pad(batch.segment_index, (0, missing)),
    )
