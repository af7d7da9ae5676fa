"""Core-seconds of a job's start in a sweep, by their parts, and the share of a sweep that is steps and evaluation.

python -m benchmarks.start [JOBS]                    starts on the tiny model, each a fork, one thread
python -m benchmarks.start phases                    where they go: prints a table, draws docs/start.png
python -m benchmarks.start share SWEEP_DIR JOBS      a sweep that has run, JOBS side by side
"""

import importlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import NO_CHECKPOINTS, ROOT, module

READY = re.compile(r"ready for the first step: ([\d.]+) s, ([\d.]+) core-seconds")
TIMED = ("time/step", "time/evaluation")
ENGINES = ("transformers", "vllm")


def starts(rollout: str, jobs: int) -> list[tuple[float, float]]:
    """Seconds and core-seconds of each job's worker from its begin to its first step's; the first job made the server."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = ["-m", *_overrides(rollout), f"seed=range({jobs})", f"hydra.sweep.dir={directory}/sweep"]
        subprocess.run(module("rlpost", *overrides), check=True, cwd=directory, stdout=subprocess.DEVNULL)
        found = [READY.search((Path(directory) / f"sweep/{job}/run.log").read_text()) for job in range(jobs)]
    return [(float(one[1]), float(one[2])) for one in found if one is not None]


def _overrides(rollout: str) -> list[str]:
    tiny = ["experiment=debug", "reward.format.pattern='[0-9]'", f"rollout={rollout}", "steps=1", "tracking=mlflow"]
    return [*tiny, "cluster.threads=1", *NO_CHECKPOINTS]


def share(sweep_dir: Path, side_by_side: int) -> dict[str, float]:
    """A sweep's wall clock, from its plan to its report, against what its jobs' steps and evaluations took."""
    plan = json.loads((sweep_dir / "sweep.json").read_text())
    runs = [sweep_dir / job["directory"] for job in plan["jobs"]]
    rows = [json.loads(line) for run in runs for line in (run / "metrics.jsonl").read_text().splitlines()]
    inside = sum(row.get(name) or 0.0 for row in rows for name in TIMED) / side_by_side
    wall = (sweep_dir / "report/report.html").stat().st_mtime - (sweep_dir / "sweep.json").stat().st_mtime
    return {"wall": wall, "inside": inside, "ratio": wall / inside}


def worker_phases(run_dir: str) -> None:
    """In a process of its own: print the core-seconds of a start's parts, as JSON."""
    import yaml

    from rlpost import worker
    from rlpost.cluster import local
    from rlpost.data.prompts import PromptFormat
    from rlpost.loop import Loop

    cfg = yaml.safe_load((Path(run_dir) / "config.yaml").read_text())
    for name in local._imports(cfg):
        importlib.import_module(name)
    spent: dict[str, float] = defaultdict(float, imports=time.process_time())
    outer: list[float] = []  # what the parts within the current one took

    def timed(owner: Any, name: str, label: str | Callable[..., str]) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            outer.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole, inner = time.process_time() - began, outer.pop()
                spent[label if isinstance(label, str) else label(*args)] += whole - inner
                if outer:
                    outer[-1] += whole

        setattr(owner, name, call)

    def built(node: Any, *_: Any) -> str:
        return "engine" if "rollout" in str(node.get("_target_")) else "other objects"

    timed(worker, "build", built)
    timed(worker, "load_tokenizer", "tokenizer")
    timed(PromptFormat, "apply", "prompts")
    timed(worker, "_policy", "trainer's model")
    timed(worker, "_tracker", "MLflow")
    timed(worker, "_assemble", "the rest")

    def stop(loop: Loop, progress: Any) -> dict[str, float]:
        print(json.dumps(spent))
        sys.stdout.flush()
        raise SystemExit

    Loop.run = stop  # type: ignore[method-assign]
    worker.main(run_dir)


def phases() -> dict[str, dict[str, float]]:
    """Core-seconds of a start's parts, by engine."""
    from rlpost.cluster import node

    found = {}
    for rollout in ENGINES:
        with tempfile.TemporaryDirectory() as directory:
            run = Path(directory) / "run"
            subprocess.run(
                module("rlpost", *_overrides(rollout), f"run_dir={run}"),
                check=True,
                cwd=directory,
                stdout=subprocess.DEVNULL,
            )
            for name in ("metrics.jsonl", "status.json"):
                (run / name).unlink()
            measured = subprocess.run(
                module("benchmarks.start", "worker", run),
                cwd=ROOT,
                env=node.environment(1, 1),
                capture_output=True,
                text=True,
            )
            (line,) = [line for line in measured.stdout.splitlines() if line.startswith("{")]
            found[rollout] = json.loads(line)
    return found


def draw(found: dict[str, dict[str, float]], path: Path) -> None:
    """Bars of a cold start and of a fork's, a colour for each part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 2.9))
    names = list(dict.fromkeys(name for parts in found.values() for name in parts))
    colors = dict(zip(names, ["#bbbbbb", "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#000000"]))  # noqa: B905
    labels = []
    for rollout, parts in found.items():
        for kind, shown in (("new process", names), ("fork", names[1:])):
            left = 0.0
            for name in shown:
                label = name if not labels else None
                axes.barh(len(labels), parts.get(name, 0.0), left=left, color=colors[name], label=label)
                left += parts.get(name, 0.0)
            axes.text(left, len(labels), f" {left:.1f}", va="center")
            labels.append(f"{rollout}, {kind}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("core-seconds from a worker's begin to its first step's, tiny model, MLflow on")
    axes.margins(x=0.08)
    axes.legend(fontsize=8, ncols=2, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(command: str = "starts", *arguments: str) -> None:
    if command == "worker":
        worker_phases(*arguments)
    elif command == "phases":
        found = phases()
        for rollout, parts in found.items():
            print(rollout, *(f"{name} {seconds:.2f}" for name, seconds in parts.items()), sep="  ")
        draw(found, ROOT / "docs/start.png")
    elif command == "share":
        for name, value in share(Path(arguments[0]), int(arguments[1])).items():
            print(f"{name:>8} {value:8.2f}")
    else:
        jobs = int(command) if command.isdigit() else 6
        for rollout in ENGINES:
            seconds, core_seconds = zip(*starts(rollout, jobs)[1:], strict=True)
            print(
                f"{rollout:>12}: {statistics.median(core_seconds):.2f} core-seconds ({min(core_seconds):.2f} to "
                f"{max(core_seconds):.2f}), {statistics.median(seconds):.2f} s, {jobs - 1} jobs"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
