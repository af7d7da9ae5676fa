"""Whole runs through the command line, and what is compared of them.

Their processes are forks of one that has the imports (rlpost/cluster/process.py): the command line, its workers and theirs.

Metrics that read a clock or the memory differ between equal runs; everything else must be equal to the last bit.
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from rlpost.cluster import node, process

CLOCK = ("time/", "memory/", "rollout/tokens_per_s", "train/tokens_per_s")
TINY = ["experiment=debug", "reward.format.pattern='[0-9]'"]
# vLLM is most of a tiny run's start: where the engine is not what a test is about, it has the other one.
LIGHT = [*TINY, "rollout=transformers"]
# Steps long enough to be killed in, with a checkpoint that is not the newest step.
KILLED = [*LIGHT, "steps=7", "checkpoint.every=2", "rollout.max_tokens=60", "prompts_per_step=8", "evaluation.every=3"]
# What the runs of these tests import, so that one forkserver has it for all of them.
IMPORTS = [
    *("rlpost.__main__", "rlpost.worker", "rlpost.models.tiny", "rlpost.models.sources"),
    *("mlflow", "mlflow.store.tracking.sqlalchemy_store"),
    *(f"rlpost.rollout.{module}" for module in ("vllm", "transformers", "server", "paged")),
    *(f"rlpost.objective.{module}" for module in ("losses", "reducers", "advantages", "corrections")),
    *(f"rlpost.rewards.{module}" for module in ("format", "number", "math", "code", "judge", "model", "environment")),
    *(
        "rlpost.data.tasks",
        "rlpost.data.mixture",
        "rlpost.rollout.filters",
        "rlpost.cluster.local",
        "rlpost.cluster.ray",
    ),
    *(
        "rlpost.cluster.slurm",
        "rlpost.environments.calculator",
        "rlpost.environments.tools",
        "rlpost.rewards.reasoning_gym",
    ),
]


class Started:
    """A command line that runs, with the methods of subprocess.Popen that tests use; what it prints goes to files."""

    def __init__(
        self,
        cwd: Path,
        arguments: Sequence[str],
        module: str = "rlpost.__main__",
        passed: Sequence[int] = (),
        **own: str,
    ) -> None:
        """Args: own: variables of its own."""
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - read at the end
        # The workers' own environment, so that one server has both.
        environment = {**node.environment(1, int(os.environ["OMP_NUM_THREADS"])), **own}
        with open(os.devnull) as nothing:
            streams = (nothing.fileno(), self._out.fileno(), self._err.fileno())
            settings = {"directory": cwd, "imports": IMPORTS, "streams": streams, "passed": passed}
            self._process = process.start(module, arguments, environment, **settings)
        self.args = [module, *arguments]
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def poll(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait()

    def communicate(self, timeout: float = 280) -> tuple[str, str]:
        """Wait for its end. Returns: its output and its errors. Raises: subprocess.TimeoutExpired."""
        self._process.wait(timeout)
        texts = []
        for stream in (self._out, self._err):
            stream.seek(0)
            texts.append(stream.read().decode())
        return texts[0], texts[1]


def start(cwd: Path, *overrides: str) -> Started:
    return Started(cwd, overrides)


def rlpost(cwd: Path, *overrides: str, code: int = 0, **own: str) -> subprocess.CompletedProcess[str]:
    """Args: own: variables of its own."""
    started = Started(cwd, overrides, **own)
    out, err = started.communicate()
    assert started.returncode == code, f"{started.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(started.args, code, out, err)


def command(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One of the other commands, to its end."""
    started = Started(Path.cwd(), arguments, module)
    out, err = started.communicate()
    return subprocess.CompletedProcess(started.args, started.returncode, out, err)


def run_ranks(module: str, count: int, *arguments: str) -> None:
    """Run a module as ranks that find each other, to the end of all; rank 0 gets the socket at which they meet, too."""
    root = Path(__file__).parents[1]
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.getsockname()[1])}
        ranks = [
            Started(root, arguments, module, [] if rank else [meeting.fileno()], RANK=str(rank), **group)
            for rank in range(count)
        ]
    for rank in ranks:
        _, err = rank.communicate()
        assert rank.returncode == 0, err[-3000:]


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


def rank_pids(run: Path) -> list[int]:
    """The processes of a run's ranks, in order: each has the run's log open, and its rank for a name."""
    log = str(run.resolve() / "run.log")
    ranks = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name = (entry / "comm").read_text().strip()
                if name.startswith("rlpost rank ") and any(os.readlink(fd) == log for fd in (entry / "fd").iterdir()):
                    ranks[int(name.rpartition(" ")[2])] = int(entry.name)
            except OSError:  # it has just ended
                continue
    return [ranks[rank] for rank in sorted(ranks)]


def wait_for_steps(run: Path, count: int, process: Started) -> None:
    while not (run / "metrics.jsonl").is_file() or len(rows(run)) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def kill_in_a_step(cwd: Path, run: str, after: int, *overrides: str) -> None:
    """SIGKILL to launcher and workers in the middle of the step after `after`."""
    process = start(cwd, *overrides, f"run_dir={run}")
    wait_for_steps(cwd / run, after, process)
    time.sleep(0.05)
    for pid in [process.pid, *rank_pids(cwd / run)]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
