"""Ranks and collectives: the only file that knows torch.distributed's communication.

Every call works with one rank too, so there is one path.

With context parallelism (`split_context`) consecutive ranks make a context group: they train on the same rollouts, and each
holds a part of every row's positions. A context group is one data rank.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from rlpost.errors import UserError
from rlpost.types import Rollout, StepTotals

T = TypeVar("T")

_ranks: DeviceMesh | None = None  # (data, context), once there is a context to split


def init(meeting: int | None = None, timeout_s: float = 1800) -> None:
    """Join the process group that torchrun's variables describe; without them, make a group of one.

    Args: meeting: on rank 0, the descriptor of a listening socket for MASTER_PORT, if it has been opened already.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" not in os.environ:
        store = dist.HashStore()
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
    else:
        timeout = timedelta(seconds=timeout_s)
        if meeting is None:
            store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
        else:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            rank, world_size = 0, int(os.environ["WORLD_SIZE"])
            store = dist.TCPStore(address, port, world_size, True, timeout, master_listen_fd=meeting)
        # torchrun's store outlives the ranks that it starts again: they would take their forerunners' addresses from it.
        attempt = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(_backend(device), timeout=timeout, store=attempt, rank=rank, world_size=world_size)
    if device == "cuda":
        # Ray shows each rank its own GPU alone, torchrun shows all of a node's.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def split_context(size: int) -> None:
    """Make context groups of `size` consecutive ranks.

    Raises: UserError if the ranks do not divide into them.
    """
    global _ranks
    if world_size() % size:
        raise UserError(f"trainer.context_parallel={size} does not divide the run's {world_size()} ranks")
    shape = (world_size() // size, size)
    _ranks = init_device_mesh(device().type, shape, mesh_dim_names=("data", "context")) if size > 1 else None


def shutdown() -> None:
    global _ranks
    _ranks = None
    side_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_loss_of_peers(error: Exception) -> bool:
    """An operation between ranks failed because others are gone, or do not answer: the fault is theirs.

    Gloo has no error class of its own: its messages name the file of its sources that saw the connection end. What follows
    from such an error, such as a run that has lost its last rollout server, is another one.
    """
    return world_size() > 1 and (isinstance(error, dist.DistError) or "gloo/transport" in str(error))


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


def context_size() -> int:
    return 1 if _ranks is None else _ranks.size(1)


def context_rank() -> int:
    return 0 if _ranks is None else _ranks.get_local_rank("context")


def _data_group() -> dist.ProcessGroup | None:
    """One rank of every context group, this one among them; None: all ranks."""
    return None if _ranks is None else _ranks.get_group("data")


def sharding_mesh(replicas: int = 1) -> DeviceMesh:
    """All ranks in one dimension; with several replicas in two: gradients summed over the first, shards over the second.

    Raises: UserError if the ranks do not divide into that many replicas.
    """
    if world_size() % replicas:
        raise UserError(f"trainer.replicas={replicas} does not divide the run's {world_size()} ranks")
    if replicas == 1:
        return init_device_mesh(device().type, (world_size(),), mesh_dim_names=("shard",))
    shape = (replicas, world_size() // replicas)
    return init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard"))


class RankGroup:
    """`size` consecutive ranks, this one among them; every rank of the run makes its group at the same time.

    Attributes:
        index: this rank's place in it.
    """

    def __init__(self, size: int) -> None:
        self.index = rank() % size if size > 1 else 0
        self._group = dist.new_subgroups(size, backend="gloo")[0] if size > 1 else None

    def gather(self, item: T) -> list[T]:
        """Each rank's object, in order, on each of them."""
        return [item] if self._group is None else _gather(item, self._group)


class Link:
    """One sender of tensors, place 0, and receivers that are no ranks of the run: over NCCL where there are GPUs, else gloo.

    Args:
        address, port: of the sender's store (`Link.store`).
        timeout_s: of joining, and of every tensor.

    Raises: RuntimeError from every method once one of them is gone.
    """

    def __init__(self, address: str, port: int, place: int, size: int, timeout_s: float, store: Any = None) -> None:
        timeout = timedelta(seconds=timeout_s)
        store = store or dist.TCPStore(address, port, is_master=False, timeout=timeout)
        if torch.cuda.is_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, place, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, place, size, timeout)

    @staticmethod
    def store(timeout_s: float) -> Any:
        """Where the others of a link find each other, on a `port` of this machine."""
        return dist.TCPStore(
            "localhost", 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )

    def send(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            self._broadcast(_header(name, tensor))
            self._broadcast(tensor.contiguous())
        self._broadcast(_header("", torch.empty(0)))

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """What the next `send` sends, on the host."""
        while True:
            header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
            name, dtype, shape = json.loads(bytes(self._broadcast(header).cpu().tolist()))
            if not name:
                return
            yield name, self._broadcast(torch.empty(shape, dtype=getattr(torch, dtype))).cpu()

    def close(self) -> None:
        """The others' calls fail."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _broadcast(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(device())
        if self._group is None:
            raise RuntimeError("the link is closed")
        self._group.broadcast(tensor, 0).wait()
        return tensor


_HEADER_BYTES = 1024


def _header(name: str, tensor: Tensor) -> Tensor:
    text = json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]).encode()
    return torch.tensor(list(text.ljust(_HEADER_BYTES)), dtype=torch.uint8)


@lru_cache(maxsize=1)
def side_group() -> dist.ProcessGroup:
    """A second gloo group of all ranks, for threads beside the trainer."""
    return dist.new_group(backend="gloo")


def barrier() -> None:
    dist.barrier()


def sum_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Sum of each named value over ranks, in float64; every rank gives the same names."""
    return _reduce(values, dist.ReduceOp.SUM)


def sum_over_data(values: Mapping[str, float]) -> dict[str, float]:
    """`sum_over_ranks` of what the ranks of a context group all hold, counted once for each of them."""
    return _reduce(values, dist.ReduceOp.SUM, _data_group())


def max_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Largest of each named value over ranks; every rank gives the same names. NaN on any rank gives NaN."""
    has_nan = _reduce({name: float(value != value) for name, value in values.items()}, dist.ReduceOp.SUM)
    largest = _reduce({n: v if v == v else -float("inf") for n, v in values.items()}, dist.ReduceOp.MAX)
    return {name: float("nan") if has_nan[name] else largest[name] for name in values}


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank, so that all of them decide alike."""
    return bool(sum_over_ranks({"flag": float(flag)})["flag"])


def _reduce(values: Mapping[str, float], op: dist.ReduceOp, group: dist.ProcessGroup | None = None) -> dict[str, float]:
    names = sorted(values)
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64)
    dist.all_reduce(tensor, op=op, group=group)
    return dict(zip(names, tensor.tolist(), strict=True))


def sum_totals(totals: StepTotals) -> StepTotals:
    """Totals of the step from the totals of each data rank's share."""
    counts = torch.tensor(astuple(totals)[:2])
    dist.all_reduce(counts, group=_data_group())
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
    return _gather(item, _data_group())


def gather_in_context(item: T) -> list[T]:
    """The objects of this rank's context group, in order, on each of its ranks."""
    return [item] if _ranks is None else _gather(item, _ranks.get_group("context"))


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


def share_of(items: list[T]) -> list[T]:
    """This rank's part of a list that every rank holds: every world-size-th item."""
    return items[rank() :: world_size()]


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


def scatter_heads(x: Tensor) -> Tensor:
    """[positions here, H, D] -> [all positions, H / size, D] within the context group: for each rank its heads, whole."""
    size = context_size()
    parts = x.unflatten(1, (size, -1)).transpose(0, 1)  # [size of heads, S, H / size, D]
    return _Transpose.apply(parts.contiguous()).flatten(0, 1)


def gather_heads(x: Tensor) -> Tensor:
    """[all positions, H / size, D] -> [positions here, H, D]: the way back."""
    parts = x.unflatten(0, (context_size(), -1))  # [size of positions, S, H / size, D]
    return _Transpose.apply(parts.contiguous()).transpose(0, 1).flatten(1, 2)


class _Transpose(torch.autograd.Function):
    """[size, ...]: part i goes to the context group's rank i, whose part for this rank takes its place. Its own adjoint."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts)
        assert _ranks is not None
        dist.all_to_all_single(received, parts, group=_ranks.get_group("context"))
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Transpose.apply(grad.contiguous())


def gather_tokens(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """[sizes[i]] on the context group's rank i -> [sum of sizes], rank after rank, on each.

    What is computed from them has to be the same on each rank: the gradient is that of this rank's own values in it.
    """
    return _GatherTokens.apply(values, tuple(sizes))


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        assert _ranks is not None
        first = sum(sizes[: context_rank()])
        ctx.own = slice(first, first + len(values))
        longest = values.new_zeros(max(sizes))  # gloo gathers equal sizes only
        longest[: len(values)] = values
        received = [torch.empty_like(longest) for _ in sizes]
        dist.all_gather(received, longest, group=_ranks.get_group("context"))
        return torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.own], None
