"""Conclusions of the benchmarks, from numbers made by hand."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.floor import check
from benchmarks.start import share


def test_a_floor_that_is_beaten_is_none() -> None:
    check("float32", {"update": 6.0, "rollout": 4.0}, {"update": 5.0, "rollout": 4.0})
    with pytest.raises(RuntimeError, match=r"bfloat16: the rollout took 3\.90 s, less than its floor of 4\.00 s"):
        check("bfloat16", {"update": 6.0, "rollout": 3.9}, {"update": 5.0, "rollout": 4.0})


def test_a_sweeps_share_of_steps_and_evaluations(tmp_path: Path) -> None:
    """Two jobs side by side of 3 and 5 seconds, in a sweep of 8."""
    (tmp_path / "sweep.json").write_text(json.dumps({"jobs": [{"directory": "a"}, {"directory": "b"}]}))
    for name, rows in {
        "a": [{"time/step": 1.0}, {"time/step": 1.5, "time/evaluation": 0.5}],
        "b": [{"time/step": 5.0}],
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "report").mkdir()
    (tmp_path / "report/report.html").touch()

    os.utime(tmp_path / "sweep.json", (100.0, 100.0))
    os.utime(tmp_path / "report/report.html", (108.0, 108.0))
    assert share(tmp_path, 2) == {"wall": 8.0, "inside": 4.0, "ratio": 2.0}
