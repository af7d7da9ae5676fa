"""Matrix products on CPUs.

PyTorch gives float32 products to MKL, which on some AMD processors runs at less than half of oneDNN's speed (2 threads
of an AVX-512 EPYC, [1840, 576] x [576, 1536]: 205 against 442 GFLOP/s; on another 195 against 210).
"""

import torch
from torch import Tensor


def has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def has_bfloat16() -> bool:
    """True if this CPU multiplies bfloat16 itself; where it does not, float32 is several times as fast."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b.T [K, N], through oneDNN where that applies: float32, on a CPU, nothing empty. No gradient."""
    if has_onednn() and a.device.type == "cpu" and a.dtype == b.dtype == torch.float32 and a.numel() and b.numel():
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return a @ b.T
