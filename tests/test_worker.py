"""What the worker writes down at the end of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlpost.record.rundir import RunDir
from rlpost.worker import _finish


def test_a_run_without_a_known_logprob_difference_finishes(tmp_path: Path) -> None:
    rows = [{"step": i, "reward/mean": None, "rollout/logprob_diff_max": None, "time/step": 0.5} for i in (1, 2)]
    closed: list[Any] = []
    tracker = SimpleNamespace(summary=lambda: rows, mlflow_run_id=None, close=lambda *end: closed.append(end))
    progress = SimpleNamespace(say=lambda text: None)
    loop = SimpleNamespace(step=2, recorder=SimpleNamespace(tokens=7, progress=progress))
    run = RunDir(tmp_path)
    _finish(run, loop, tracker, {})
    result = run.result()
    assert (result["logprob_diff_max"], result["seconds"], result["tokens"]) == (None, 1.0, 7)
    assert run.status()["state"] == "finished"
    assert closed[0][0] == "FINISHED"
