"""Tensors to processes that are no ranks of the run."""

import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlpost.distributed.ranks import device


class Link:
    """One sender of tensors, place 0, and receivers that are no ranks of the run: over NCCL where there are GPUs, else gloo.

    Args:
        address, port: the address of the sender's store (`Link.store`).
        timeout_s: seconds that joining may take, and every tensor.

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
        """The store at which the others of a link find each other, on a `port` of this machine."""
        return dist.TCPStore(
            "localhost", 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )

    def send(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            self._broadcast(_header(name, tensor))
            self._broadcast(tensor.contiguous())
        self._broadcast(_header("", torch.empty(0)))

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """The host's copies of the tensors that the next `send` sends."""
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
        self._group.broadcast(tensor, 0).wait()  # pyright: ignore[reportAttributeAccessIssue] - the stubs lack it
        return tensor


_HEADER_BYTES = 1024


def _header(name: str, tensor: Tensor) -> Tensor:
    text = json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]).encode()
    return torch.tensor(list(text.ljust(_HEADER_BYTES)), dtype=torch.uint8)
