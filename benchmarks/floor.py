"""(b): update and rollout of the default model against what their matrix products alone take on this machine.

The floor holds every product of the model, each with operands of its own (as in the model, they are not in the cache),
through the quickest kernel at hand (PyTorch's two libraries, and the one that the engine packs its weights for), and nothing
else: no attention, no norm, no optimizer, no sampling. A run that is quicker than its floor is an error of this benchmark.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.against_trl import BF16, ours, prompts
from benchmarks.common import median_seconds, model_shape, module, run
from rlpost.cluster.node import MALLOC
from rlpost.objective.matmul import has_bfloat16

OPERANDS = 6  # sets of operands to go round: together they are larger than the cache


def products(rows: int, dtype_name: str, width: int, inner: int, key_width: int) -> dict[str, float]:
    """Seconds of one forward and one backward pass over a block's seven products, for `rows` positions."""
    shapes = [(width, width)] * 2 + [(key_width, width)] * 2 + [(inner, width)] * 2 + [(width, inner)]
    forward = sum(_product(rows, k, n, dtype_name) for n, k in shapes)
    to_input = sum(_product(rows, n, k, dtype_name) for n, k in shapes)
    to_weight = sum(_product(n, rows, k, dtype_name) for n, k in shapes)
    return {"forward": forward, "backward": to_input + to_weight}


_known: dict[tuple[Any, ...], float] = {}


def _product(m: int, k: int, n: int, dtype_name: str) -> float:
    """Seconds of [m, k] x [k, n]."""
    import torch

    from rlpost.objective.matmul import times_transposed

    key = (m, k, n, dtype_name)
    if key not in _known:
        dtype = getattr(torch, dtype_name)
        sets = [(torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)) for _ in range(OPERANDS)]

        packed = [(a, _packed(b)) for a, b in sets]
        every = [
            lambda: [times_transposed(a, b) for a, b in sets],
            lambda: [a @ b.T for a, b in sets],
            lambda: [multiply(a) for a, multiply in packed],
        ]
        quickest = min(median_seconds(multiply_all) for multiply_all in every)
        _known[key] = quickest / OPERANDS
    return _known[key]


def _packed(weight: Any) -> Any:
    """The engine's product with a weight [n, k], which it packs once for the kernel that it finds quickest here."""
    import torch
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return lambda a: layer.cpu_linear(a, layer.weight, None)


def check(dtype: str, measured: dict[str, float], floor: dict[str, float]) -> None:
    """Raises: RuntimeError if a phase took less than its floor: then it is none."""
    for phase, seconds in measured.items():
        if seconds < floor[phase]:
            raise RuntimeError(
                f"{dtype}: the {phase} took {seconds:.2f} s, less than its floor of {floor[phase]:.2f} s"
            )


def floors(dtype_name: str, positions: int, tokens: int, prompt_tokens: int, decode_rows: int = 64) -> dict[str, float]:
    """Seconds of an update over `positions`, `tokens` of them predicted, and of sampling them.

    Sampling computes every prompt once and then `decode_rows` tokens at a time.
    """
    model = model_shape()
    width, inner, vocabulary, layers = model.hidden, model.inner, model.vocabulary, model.layers
    shape = (width, inner, model.head_width * model.kv_heads)
    chunk = min(tokens, 2**24 // vocabulary)

    blocks = products(1024, dtype_name, *shape)
    head = [
        _product(chunk, width, vocabulary, dtype_name),
        _product(chunk, vocabulary, width, dtype_name),
        _product(vocabulary, chunk, width, dtype_name),
    ]
    decoding = products(decode_rows, dtype_name, *shape)["forward"] * layers
    decoding += _product(decode_rows, width, vocabulary, dtype_name)
    return {
        "update": sum(blocks.values()) * layers * positions / 1024 + sum(head) * tokens / chunk,
        "rollout": blocks["forward"] * layers * prompt_tokens / 1024 + decoding * tokens / decode_rows,
        "update_gflop": 3e-9 * model.products(positions, tokens),
        "rollout_gflop": 1e-9 * model.products(prompt_tokens + tokens, tokens),
    }


def copy_rate() -> float:
    """GB/s of a copy of 256 MiB, read and write both counted."""
    import torch

    a = torch.ones(2**26)
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / 1e9 / median_seconds(lambda: b.copy_(a))


def measure() -> dict[str, Any]:
    """Phases of the busy case, where nothing is left out, against their floors, in one run."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        file = prompts("busy", scratch / "prompts.jsonl")
        for dtype in ["float32"] + ["bfloat16"] * has_bfloat16():
            print(f"floor, {dtype}", flush=True)
            extra = [] if dtype == "float32" else BF16
            result = ours("busy", 6, file, scratch, *extra)
            tokens = round(sum(result["lengths"]) / len(result["lengths"]) * 64)
            prompt_tokens = round(sum(result["prompt_tokens"]) / len(result["prompt_tokens"]))
            arguments = (dtype, prompt_tokens + tokens, tokens, prompt_tokens)
            # A process of its own, with the same memory settings as a run's.
            floor = json.loads(
                run(module("benchmarks.floor", *arguments), GLIBC_TUNABLES=MALLOC).output.splitlines()[-1]
            )
            check(dtype, {phase: statistics.median(result[phase]) for phase in ("update", "rollout")}, floor)
            results[dtype] = {"run": result, "tokens": tokens, "prompt_tokens": prompt_tokens, "floor": floor}
    return results


if __name__ == "__main__":
    import sys

    name, *counts = sys.argv[1:]
    print(json.dumps({**floors(name, *map(int, counts)), "copy_gb_s": copy_rate()}))
