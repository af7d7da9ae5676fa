"""What the benchmarks share: the machine's numbers, timed processes, runs of rlpost, and synthetic rollouts."""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.cluster.node import available_cores
from rlpost.cluster.process import FAMILY
from rlpost.planning.costs import Shape
from rlpost.types import Completion, Example, Prompt, Rollout

ROOT = Path(__file__).resolve().parent.parent
NO_CHECKPOINTS = ["checkpoint.every=0", "checkpoint.at_end=false", "evaluation.at_end=false"]


@dataclass(frozen=True)
class Finished:
    """A process that has ended well."""

    seconds: float
    peak_rss_gb: float  # of the largest process it consisted of
    output: str


def run(command: Sequence[str], **environment: str) -> Finished:
    """Run to the end, with the CPU threads of `environment` or all cores.

    Raises: RuntimeError with the end of its output if it fails.
    """
    started = time.perf_counter()
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(available_cores()),
        FAMILY: "",  # new processes: a fork's memory would not be counted
        **environment,
    }
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{output[-3000:]}")
    return Finished(time.perf_counter() - started, usage.ru_maxrss * 1024 / 1e9, output)


def module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]


def rlpost(run_dir: Path, *overrides: str) -> tuple[list[dict[str, Any]], Finished]:
    """A run. Returns: the rows of its metrics.jsonl, and its process."""
    finished = run(module("rlpost", f"run_dir={run_dir}", *overrides))
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()], finished


def median_seconds(action: Callable[[], object], repeats: int = 7) -> float:
    """Median over the repeats, after one more that warms up."""
    action()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and smallest to largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def synthetic(num_groups: int, num_samples: int, prompt: int, completion: int, vocabulary: int) -> list[Rollout]:
    """Rollouts of random tokens, every advantage other than 0."""
    draw = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, vocabulary) for _ in range(count))

    rollouts = []
    for group in range(num_groups):
        asked = Prompt(Example((), None), ids(prompt), "", group_id=group)
        for sample in range(num_samples):
            answer = Completion(ids(completion), (-5.0,) * completion, "", "length")
            rollouts.append(Rollout(asked, answer, sample, advantage=draw.choice([-1.0, 1.0])))
    return rollouts


def cpu() -> str:
    """The processor's name, and the library it multiplies with."""
    import torch

    known = torch.cpu.get_capabilities()
    shown = [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16", "bf16") if known.get(name)]
    return ", ".join([known.get("cpu_name", known["architecture"]), *shown])


def default_model() -> Path:
    """The directory of the default experiment's model."""
    from omegaconf import OmegaConf

    from rlpost.config.build import build

    return build(OmegaConf.load(ROOT / "conf/model/smollm2-135m.yaml")).directory()


def model_shape() -> Shape:
    """The default experiment's model, for the cost model."""
    return Shape.from_config(json.loads((default_model() / "config.json").read_text()), "config.json")


def make_policy(directory: Path, precision: str = "float32") -> Any:
    """A Policy with the default objective, optimizer and micro-batches."""
    from rlpost import distributed
    from rlpost.config.schema import AlgorithmConfig, TrainerConfig
    from rlpost.objective.logprobs import SamplingDistribution
    from rlpost.objective.objective import Objective
    from rlpost.trainer import model as trainer_model
    from rlpost.trainer.optimizer import AdamW
    from rlpost.trainer.policy import Policy

    distributed.init()
    trainer = TrainerConfig(precision=precision)
    policy_model = trainer_model.shard(
        trainer_model.load(directory), SamplingDistribution(), distributed.sharding_mesh(), trainer
    )
    return Policy(
        policy_model,
        None,
        Objective(),
        AdamW(lr=1e-6)(policy_model.parameters(), 1),
        AlgorithmConfig(),
        micro_batch_tokens=trainer.micro_batch_tokens,
        max_completion_tokens=2**15,
        max_logprob_diff=None,
        seed=0,
    )
