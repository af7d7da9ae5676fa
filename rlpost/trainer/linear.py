"""float32 linear layers on CPUs through oneDNN.

PyTorch gives float32 products to MKL, which on AMD processors runs at less than half of oneDNN's speed (2 threads of
an AVX-512 EPYC, [1840, 576] x [576, 1536]: 205 against 442 GFLOP/s). Inference gets oneDNN by repacking weights; a
weight that changes every step is multiplied as it lies, in the backward pass too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class OneDNNLinear(nn.Linear):
    """`nn.Linear` with both passes through oneDNN where that applies: float32, on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        applies = input.device.type == "cpu" and input.dtype == weight.dtype == torch.float32 and input.numel()
        if not applies:
            return functional.linear(input, weight, self.bias)
        output = _Product.apply(input.flatten(0, -2), weight).unflatten(0, input.shape[:-1])
        return output if self.bias is None else output + self.bias


class _Product(torch.autograd.Function):
    """x [T, K], w [N, K] -> x @ w.T [T, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _times_transposed(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        grad_x = _times_transposed(grad, w.T) if ctx.needs_input_grad[0] else None
        grad_w = _times_transposed(grad.T, x.T) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w


def _times_transposed(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


def use_onednn(model: nn.Module) -> None:
    """Turn the model's linear layers into OneDNNLinear, in place; their parameters stay where they are."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear
