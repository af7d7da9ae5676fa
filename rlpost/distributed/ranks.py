"""The process group, and each rank's place in it.

With context parallelism (`split_context`) consecutive ranks make a context group: they train on the same rollouts, and each
holds a part of every row's positions. A context group is one data rank.
"""

import os
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlpost.errors import UserError

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


def data_group() -> dist.ProcessGroup | None:
    """The group with one rank of every context group, this rank among them; None stands for all ranks."""
    return None if _ranks is None else _ranks.get_group("data")


def context_group() -> dist.ProcessGroup | None:
    """The group of this rank's context group; None where each rank is one by itself."""
    return None if _ranks is None else _ranks.get_group("context")


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


@lru_cache(maxsize=1)
def side_group() -> dist.ProcessGroup:
    """A second gloo group of all ranks, for threads beside the trainer."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return group
