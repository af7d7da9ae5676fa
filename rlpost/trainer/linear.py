"""float32 linear layers on CPUs through oneDNN.

Inference gets oneDNN by repacking weights; a weight that changes every step is multiplied as it lies, in the backward
pass too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlpost.objective.matmul import has_onednn, times_transposed


class OneDNNLinear(nn.Linear):
    """`nn.Linear` with both passes through oneDNN where that applies: float32, on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if input.device.type != "cpu" or not input.dtype == weight.dtype == torch.float32:
            return functional.linear(input, weight, self.bias)
        output = _Product.apply(input.flatten(0, -2), weight).unflatten(0, input.shape[:-1])
        return output if self.bias is None else output + self.bias


class _Product(torch.autograd.Function):
    """x [T, K], w [N, K] -> x @ w.T [T, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return times_transposed(x, w)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - autograd passes as many as there are
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        grad_x = times_transposed(grad, w.T) if ctx.needs_input_grad[0] else None
        # Both operands would have to be turned round for oneDNN, which takes longer than MKL's slower product.
        grad_w = grad.T @ x if ctx.needs_input_grad[1] else None
        return grad_x, grad_w


def use_onednn(model: nn.Module) -> None:
    """Turn the model's linear layers into OneDNNLinear, in place; their parameters stay where they are."""
    if not has_onednn():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear
