"""(d): the update as completions, groups and the vocabulary grow, and memory as a step does at a fixed budget.

Every point is a process of its own: python -m benchmarks.growth NAME VALUE
"""

import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import default_model, make_policy, module, run, synthetic
from rlpost.cluster.node import MALLOC

LENGTHS = [32, 64, 128, 256, 512, 1024]
GROUP_SIZES = [4, 8, 16, 32, 64]
VOCABULARIES = [8192, 32768, 49152, 131072]
STEP_TOKENS = [2048, 8192, 32768]
LAYERS = 3  # of the default model's 30, where only the shape of the curves matters


def save_model(vocabulary: int, target: Path) -> None:
    """A model of the default one's width, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = json.loads((default_model() / "config.json").read_text())
    config |= {"vocab_size": vocabulary, "num_hidden_layers": LAYERS}
    LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.items() if k != "architectures"})).save_pretrained(target)


def rollouts(name: str, value: int, vocabulary: int) -> list[Any]:
    """2048 completion tokens, but for the memory curve: prompts of 64."""
    if name == "completion length":
        return synthetic(max(1, 256 // value), min(8, 2048 // value), 64, value, vocabulary)
    if name == "group size":
        return synthetic(64 // value, value, 64, 32, vocabulary)
    if name == "vocabulary":
        return synthetic(4, 8, 64, 64, vocabulary)
    return synthetic(value // 1024, 8, 64, 120, vocabulary)  # 1024 packed positions a group


def point(name: str, value: int) -> dict[str, float]:
    vocabulary = value if name == "vocabulary" else 49152
    whole = name == "packed tokens a step"  # memory is weighed against that of all layers
    with tempfile.TemporaryDirectory() as directory:
        if not whole:
            save_model(vocabulary, Path(directory))
        policy = make_policy(default_model() if whole else Path(directory))
    made = rollouts(name, value, vocabulary)
    groups = sorted({r.prompt.group_id for r in made})
    seconds = []
    for step in range(2 if whole else 3):  # the first makes the optimizer's moments
        started = time.perf_counter()
        policy.update(made, groups, step)
        seconds.append(time.perf_counter() - started)
    tokens = sum(len(r.completion.token_ids) for r in made)
    positions = tokens + sum(len(r.prompt.token_ids) for r in made if r.sample_index == 0)
    return {
        "seconds": statistics.median(seconds[1:]),
        "tokens": tokens,
        "positions": positions,
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def measure() -> dict[str, Any]:
    curves = {
        "completion length": LENGTHS,
        "group size": GROUP_SIZES,
        "vocabulary": VOCABULARIES,
    }
    return {name: _curve(name, values) for name, values in curves.items()}


def measure_memory() -> dict[str, Any]:
    """Seconds and memory of the default model, as the tokens of a step grow and those of a micro-batch do not."""
    return _curve("packed tokens a step", STEP_TOKENS)


def _curve(name: str, values: list[int]) -> dict[str, Any]:
    print(f"growth: {name}", flush=True)
    outputs = [run(module("benchmarks.growth", name, v), GLIBC_TUNABLES=MALLOC).output for v in values]
    return {str(v): json.loads(o.splitlines()[-1]) for v, o in zip(values, outputs, strict=True)}


if __name__ == "__main__":
    print(json.dumps(point(sys.argv[1], int(sys.argv[2]))))
