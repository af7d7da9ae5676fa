"""rlpost-plan's counts and seconds against what they stand for, on the default model: python -m benchmarks.plan

Bytes and FLOPs are counted on the real objects. Seconds are predicted from the rates of (b) and held against its run.
"""

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import default_model, make_policy, model_shape, module, run, synthetic
from rlpost.cluster.node import MALLOC
from rlpost.planning.costs import Batch
from rlpost.planning.estimate import Setting, phases, trainer_memory
from rlpost.planning.hardware import Machine

BATCH = Batch(groups=8, samples=8, prompt=40, completion=26, budget=2048)
ENGINE_STEP = 0.02  # docs/performance.md: Python an engine step
CACHE = 2**28


def setting(batch: Batch) -> Setting:
    """The default experiment's, one process in float32."""
    return Setting(
        shape=model_shape(),
        gpus=1,
        batch=batch,
        optimizer_steps=1,
        epochs=1,
        longest=288,
        width=4,
        checkpointing=False,
        scorings=0,
        reference_scorings=0,
        idle_share=0.0,
        engine_width=4,
        max_num_seqs=64,
        block_size=32,
        memory_share=None,
        cache=2**30,
    )


def counts() -> dict[str, tuple[float, float]]:
    """By name: predicted, and of the real objects."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from rlpost.data.packing import pack
    from rlpost.models.sources import end_token_ids, load_tokenizer
    from rlpost.rollout.vllm import VLLMEngine
    from rlpost.trainer.checkpoint import Checkpoints
    from rlpost.trainer.model import _hidden_states

    def product(x: torch.Size, w: torch.Size, *_: Any, out_shape: Any = None, **unused: Any) -> int:
        """x [..., K], w [N, K], which PyTorch does not count."""
        return 2 * x.numel() * w[0]

    def added(_: Any, a: torch.Size, b: torch.Size, out_shape: Any = None, **unused: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    s = setting(BATCH)
    shape, directory = s.shape, default_model()
    memory = {item.name: item.size for item in trainer_memory(s)}
    policy = make_policy(directory)
    rollouts = synthetic(8, 8, BATCH.prompt, BATCH.completion, shape.vocabulary)
    (batch,) = pack(rollouts, [True] * len(rollouts), BATCH.budget)
    own = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            saved[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _hidden_states(policy.model.language_model, batch, None)
    kept = float(sum(t.untyped_storage().nbytes() for t in saved.values()))
    saved.clear()
    expected = BATCH.positions * (shape.layers * shape.saved_bytes(4) + shape.norm_bytes(4))
    found: dict[str, tuple[float, float]] = {"activations that autograd keeps, bytes": (expected, kept)}

    custom = {torch.ops.mkldnn._linear_pointwise: product, torch.ops.aten.addmm_: added}
    with FlopCounterMode(display=False, custom_mapping=custom) as counter:
        policy.update(rollouts, list(range(8)), step=1)
    flops = BATCH.update(shape, checkpointing=False) - 3 * shape.attention(BATCH.pairs)
    found["update without attention, FLOPs"] = (flops, counter.get_total_flops())

    parameters = list(policy.model.parameters())
    moments = [state[name] for state in policy.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    real = sum(t.nbytes for t in [*parameters, *(p.grad for p in parameters), *moments])
    names = ("weights, float32", "gradients, float32", "AdamW's moments, float32")
    found["weights, gradients and moments, bytes"] = (sum(memory[name] for name in names), real)
    sent = sum(weight.nbytes for _, weight in policy.named_weights())
    found["weight sync, bytes"] = (4 * shape.parameters, sent)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = Checkpoints(Path(scratch))
        checkpoints.save(policy, 1, {})
        checkpoints.finish()
        written = sum(file.stat().st_size for file in Path(scratch).rglob("*") if file.is_file())
    found["checkpoint, bytes"] = (shape.checkpoint_bytes, written)

    del policy, parameters, moments
    end_tokens = end_token_ids(directory, load_tokenizer(directory))
    engine = VLLMEngine(directory, end_tokens, max_model_len=s.longest, kv_cache_bytes=CACHE)
    cache = engine._llm.llm_engine.vllm_config.cache_config
    found["keys and values of a token, bytes"] = (shape.kv_bytes(4), CACHE / cache.num_gpu_blocks / cache.block_size)
    engine.close()
    return found


def seconds(floor: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Phases of the run of (b) in float32: predicted from the rates measured beside it, and measured.

    Args: floor: the results of that benchmark.
    """
    entry = floor["float32"]
    measured, rates = entry["run"], entry["floor"]
    prompt, completion = round(entry["prompt_tokens"] / 8), round(entry["tokens"] / 64)
    batch = replace(BATCH, prompt=prompt, completion=completion)
    machine = Machine(
        memory=0.0,
        flops=1e9 * rates["update_gflop"] / rates["update"],
        engine_flops=1e9 * rates["rollout_gflop"] / rates["rollout"],
        bandwidth=1e9 * rates["copy_gb_s"],
        link=1.0,
        network=1.0,
        products_share=1.0,
        bandwidth_share=1.0,
        hop=0.0,
        engine_step=ENGINE_STEP,
        reserve=0.0,
    )
    idle = statistics.mean(measured["idle_groups"])
    found = phases(replace(setting(batch), idle_share=idle), machine)

    def of(*starts: str) -> float:
        return sum(p.seconds for p in found if p.name.startswith(starts))

    predicted = {"rollout": of("rollout"), "update": of("update", "optimizer"), "sync": of("weight sync")}
    return {name: (value, statistics.median(measured[name])) for name, value in predicted.items()}


def measure() -> dict[str, Any]:
    print("counts on the real objects", flush=True)
    return json.loads(run(module("benchmarks.plan"), GLIBC_TUNABLES=MALLOC).output.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(counts()))
