"""Computations of all ranks together. Every call works with one rank too, so there is one path."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlpost.data.balance import deal
from rlpost.distributed.ranks import context_group, context_size, data_group, is_main, rank, world_size
from rlpost.types import Rollout, StepTotals

T = TypeVar("T")


class RankGroup:
    """`size` consecutive ranks, this one among them; every rank of the run makes its group at the same time.

    Attributes:
        index: this rank's place in it.
    """

    def __init__(self, size: int) -> None:
        self.index = rank() % size if size > 1 else 0
        group = dist.new_subgroups(size, backend="gloo")[0] if size > 1 else None
        self._group = group if isinstance(group, dist.ProcessGroup) else None

    def gather(self, item: T) -> list[T]:
        """Each rank's object, in order, on each of them."""
        return [item] if self._group is None else _gather(item, self._group)


def barrier() -> None:
    dist.barrier()


def sum_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Sum of each named value over ranks, in float64; every rank gives the same names."""
    return _reduce(values, dist.ReduceOp.SUM)


def sum_over_data(values: Mapping[str, float]) -> dict[str, float]:
    """`sum_over_ranks` of what the ranks of a context group all hold, counted once for each of them."""
    return _reduce(values, dist.ReduceOp.SUM, data_group())


def max_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Largest of each named value over ranks; every rank gives the same names. NaN on any rank gives NaN."""
    has_nan = _reduce({name: float(value != value) for name, value in values.items()}, dist.ReduceOp.SUM)
    largest = _reduce({n: v if v == v else -float("inf") for n, v in values.items()}, dist.ReduceOp.MAX)
    return {name: float("nan") if has_nan[name] else largest[name] for name in values}


def any_rank(flag: bool) -> bool:
    """True if the flag is set on any rank, so that all of them decide alike."""
    return bool(sum_over_ranks({"flag": float(flag)})["flag"])


def _reduce(
    values: Mapping[str, float], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    names = sorted(values)
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64)
    dist.all_reduce(tensor, op=op, group=group)
    return dict(zip(names, tensor.tolist(), strict=True))


def sum_totals(totals: StepTotals) -> StepTotals:
    """Totals of the step from the totals of each data rank's share."""
    counts = torch.tensor(astuple(totals)[:2])
    dist.all_reduce(counts, group=data_group())
    return StepTotals(*counts.tolist(), max_completion_tokens=totals.max_completion_tokens)


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank; a plain tensor, or the only shard, is returned as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def gather_all(item: T) -> list[T]:
    """Every rank's object, in rank order, on every rank."""
    return _gather(item, None)


def gather_over_data(item: T) -> list[T]:
    """`gather_all` of what the ranks of a context group all hold: once for each of them."""
    return _gather(item, data_group())


def gather_in_context(item: T) -> list[T]:
    """The objects of this rank's context group, in order, on each of its ranks."""
    return [item] if context_group() is None else _gather(item, context_group())


def _gather(item: T, group: dist.ProcessGroup | None) -> list[T]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, item, group=group)
    return gathered


def gather_to_main(item: T) -> list[T]:
    """Every rank's object, in rank order, on the main rank; an empty list on the others."""
    gathered: list[Any] = [None] * world_size() if is_main() else []
    dist.gather_object(item, gathered if is_main() else None, dst=0)
    return gathered


def broadcast_from_main(item: T) -> T:
    """The main rank's object, on every rank."""
    box = [item]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def share_of(items: Sequence[T]) -> list[T]:
    """This rank's part of a list that every rank holds: every world-size-th item."""
    return list(items[rank() :: world_size()])


def balanced(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """This rank's share of everyone's rollouts: whole groups, dealt out anew so that the data ranks have equal work.

    Which prompts a rank sampled says nothing of how long the completions became. A context group's ranks get the same.
    """
    groups: dict[int, list[Rollout]] = defaultdict(list)
    for share in gather_all(list(rollouts)):
        for rollout in share:
            groups[rollout.prompt.group_id].append(rollout)
    ids = sorted(groups)
    sizes = [len(groups[i][0].prompt.token_ids) + sum(len(r.completion.token_ids) for r in groups[i]) for i in ids]
    mine = deal(sizes, world_size() // context_size())[rank() // context_size()]
    return [rollout for index in mine for rollout in groups[ids[index]]]
