"""Whole runs through the command line, and what is compared of them.

Metrics that read a clock or the memory differ between equal runs; everything else must be equal to the last bit.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

CLOCK = ("time/", "memory/", "rollout/tokens_per_s", "train/tokens_per_s")
TINY = ["experiment=debug", "reward.format.pattern='[0-9]'"]
# vLLM is most of a tiny run's start: where the engine is not what a test is about, it has the other one.
LIGHT = [*TINY, "rollout=transformers"]
# Steps long enough to be killed in, with a checkpoint that is not the newest step.
KILLED = [*LIGHT, "steps=7", "checkpoint.every=2", "rollout.max_tokens=60", "prompts_per_step=8", "evaluation.every=3"]


def start(cwd: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlpost", *overrides]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rlpost(cwd: Path, *overrides: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    process = start(cwd, *overrides)
    out, err = process.communicate(timeout=280)
    assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(process.args, code, out, err)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def exact(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in rows(run)]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    whole = run / "whole.pt"
    dcp_to_torch_save(run / "checkpoints" / f"step-{step:06d}" / "weights", whole)
    return torch.load(whole, weights_only=False)


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def worker_pids(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [pid for child in map(int, children) for pid in (child, *worker_pids(child))]


def rank_pids(launcher: int) -> list[int]:
    """The workers' processes, by rank."""
    ranks = {}
    for pid in worker_pids(launcher):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"rlpost.worker" in command and b"rlpost.agent" not in command:
            ranks.update({int(v.removeprefix(b"RANK=")): pid for v in variables if v.startswith(b"RANK=")})
    return [ranks[rank] for rank in sorted(ranks)]


def wait_for_steps(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    while not (run / "metrics.jsonl").is_file() or len(rows(run)) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def kill_in_a_step(cwd: Path, run: str, after: int, *overrides: str) -> None:
    """SIGKILL to launcher and workers in the middle of the step after `after`."""
    process = start(cwd, *overrides, f"run_dir={run}")
    wait_for_steps(cwd / run, after, process)
    time.sleep(0.05)
    for pid in [process.pid, *worker_pids(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    process.communicate()
