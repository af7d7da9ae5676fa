"""Ranks and collectives: the only file that knows torch.distributed's communication.

Every call works with one rank too, so there is one path.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rlpost.data.balance import deal
from rlpost.types import Rollout, StepTotals

T = TypeVar("T")


def init(timeout_s: float = 1800) -> None:
    """Join the process group that torchrun's environment describes; without one, make a group of one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" not in os.environ:
        store = dist.HashStore()
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
    else:
        timeout = timedelta(seconds=timeout_s)
        store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
        # torchrun's store outlives the ranks that it starts again: they would take their forerunners' addresses from it.
        attempt = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(_backend(device), timeout=timeout, store=attempt, rank=rank, world_size=world_size)
    if device == "cuda":
        # Ray shows each rank its own GPU alone, torchrun shows all of a node's.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def shutdown() -> None:
    side_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend(device: str) -> str:
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def is_main() -> bool:
    return rank() == 0


def data_mesh() -> DeviceMesh:
    return init_device_mesh(device().type, (world_size(),), mesh_dim_names=("dp",))


@lru_cache(maxsize=1)
def side_group() -> dist.ProcessGroup:
    """A second gloo group of all ranks, for threads beside the trainer."""
    return dist.new_group(backend="gloo")


def barrier() -> None:
    dist.barrier()


def sum_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Sum of each named value over ranks, in float64; every rank gives the same names."""
    return _reduce(values, dist.ReduceOp.SUM)


def max_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Largest of each named value over ranks; every rank gives the same names. NaN on any rank gives NaN."""
    has_nan = _reduce({name: float(value != value) for name, value in values.items()}, dist.ReduceOp.SUM)
    largest = _reduce({n: v if v == v else -float("inf") for n, v in values.items()}, dist.ReduceOp.MAX)
    return {name: float("nan") if has_nan[name] else largest[name] for name in values}


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank, so that all of them decide alike."""
    return bool(sum_over_ranks({"flag": float(flag)})["flag"])


def _reduce(values: Mapping[str, float], op: dist.ReduceOp) -> dict[str, float]:
    names = sorted(values)
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64)
    dist.all_reduce(tensor, op=op)
    return dict(zip(names, tensor.tolist(), strict=True))


def sum_totals(totals: StepTotals) -> StepTotals:
    """Totals of the step from the totals of each rank's share."""
    counts = torch.tensor(astuple(totals)[:2])
    dist.all_reduce(counts)
    return StepTotals(*counts.tolist(), max_completion_tokens=totals.max_completion_tokens)


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank; a plain tensor, or the only shard, is returned as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def gather_all(item: T) -> list[T]:
    """Every rank's object, in rank order, on every rank."""
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, item)
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


def share_of(items: list[T]) -> list[T]:
    """This rank's part of a list that every rank holds: every world-size-th item."""
    return items[rank() :: world_size()]


def balanced(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """This rank's share of everyone's rollouts: whole groups, dealt out anew so that the ranks have equal work.

    Which prompts a rank sampled says nothing of how long the completions became.
    """
    groups: dict[int, list[Rollout]] = defaultdict(list)
    for share in gather_all(list(rollouts)):
        for rollout in share:
            groups[rollout.prompt.group_id].append(rollout)
    ids = sorted(groups)
    sizes = [len(groups[i][0].prompt.token_ids) + sum(len(r.completion.token_ids) for r in groups[i]) for i in ids]
    mine = deal(sizes, world_size())[rank()]
    return [rollout for index in mine for rollout in groups[ids[index]]]
