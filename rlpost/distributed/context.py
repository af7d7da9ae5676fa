"""Exchanges between the ranks of a context group within a forward and a backward pass."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlpost.distributed.ranks import context_group, context_rank, context_size


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
        dist.all_to_all_single(received, parts, group=context_group())
        return received

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - autograd passes as many as there are
        ctx: Any, grad: Tensor
    ) -> Tensor:
        return _Transpose.apply(grad.contiguous())


def gather_tokens(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """[sizes[i]] on the context group's rank i -> [sum of sizes], rank after rank, on each.

    What is computed from them has to be the same on each rank: the gradient is that of this rank's own values in it.
    """
    return _GatherTokens.apply(values, tuple(sizes))


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        first = sum(sizes[: context_rank()])
        ctx.own = slice(first, first + len(values))
        longest = values.new_zeros(max(sizes))  # gloo gathers equal sizes only
        longest[: len(values)] = values
        received = [torch.empty_like(longest) for _ in sizes]
        dist.all_gather(received, longest, group=context_group())
        return torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - autograd passes as many as there are
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None]:
        return grad[ctx.own], None
