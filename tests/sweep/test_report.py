"""The page, its tables and its figures, from sweeps written by hand; the sweep's MLflow run in a real store."""

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest

from rlpost.commands.report import main
from rlpost.errors import UserError
from rlpost.sweep import parent_run
from rlpost.sweep.arms import Plan
from rlpost.sweep.claims import freeze, token_weights
from rlpost.sweep.report import write_report
from tests.sweep.helpers import make_job, make_plan

ARMS = ["grpo", "d64", "token_mean"]


def make_finished(sweep_dir: Path, seeds: Sequence[int] = (0, 1, 2)) -> Plan:
    """d64 is 0.3, 0.2 and 0.25 above grpo; token_mean is its equal. First steps are alike."""
    plan = make_plan(sweep_dir, ARMS, seeds)
    for seed in seeds:
        start = 0.1 * (seed + 1)
        lengths = {"completions/length_incorrect": [10.0 + seed, 11.0, 12.0], "eval/addition/accuracy": [0.1, 0.2, 0.5]}
        for arm, end in (("grpo", start), ("d64", start + [0.3, 0.2, 0.25][seed]), ("token_mean", start)):
            make_job(sweep_dir, arm, seed, [start, 1.5 * end - start / 2, 1.5 * end - start / 2], lengths)
    return plan


def table(sweep_dir: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (sweep_dir / "report/table.csv").open() as file:
        return {(row["measure"], row["arm"]): row for row in csv.DictReader(file)}


def test_the_report_of_a_finished_sweep(tmp_path: Path) -> None:
    make_finished(tmp_path)
    page, report = write_report(tmp_path)
    text = page.read_text()
    rows = table(tmp_path)
    assert float(rows["reward_end", "d64"]["mean"]) == pytest.approx(0.45)
    assert float(rows["reward_end", "d64"]["difference"]) == pytest.approx(0.25)
    # t of 0.3, 0.2, 0.25: 0.25 -+ 4.3027 * 0.05 / sqrt(3)
    assert float(rows["reward_end", "d64"]["difference_low"]) == pytest.approx(0.25 - 0.12421, abs=1e-5)
    assert float(rows["reward_end", "d64"]["p"]) == pytest.approx(0.01307, abs=1e-5)
    assert float(rows["reward_end", "d64"]["p_holm"]) == pytest.approx(2 * 0.01307, abs=1e-4)  # two arms compared
    assert float(rows["reward_end", "d64"]["p_permutation"]) == 0.25
    assert rows["steps_to", "d64"]["p"] == ""  # what some may never reach is not tested
    assert "d64 is higher than grpo in mean reward, last 5 steps: +0.25" in text
    assert "token_mean is not distinguishable from grpo in mean reward" in text
    assert "alike in all arms (seeds 0, 1, 2)" in text
    assert not report.missing
    # offline: nothing is loaded from anywhere, figures are in the page and beside it
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert text.count("data:image/png") == len(list(page.parent.glob("*.png"))) >= 5
    assert {"reward.png", "length_by_correctness.png"} <= {p.name for p in page.parent.glob("*.png")}
    with (page.parent / "curves.csv").open() as file:
        curves = {(row["metric"], row["arm"], row["step"]): row for row in csv.DictReader(file)}
    assert float(curves["reward/mean", "grpo", "1"]["mean"]) == pytest.approx(0.2)
    assert float(curves["reward/mean", "grpo", "1"]["t_low"]) == pytest.approx(0.2 - 0.24841, abs=1e-5)


def test_the_report_of_an_unfinished_sweep_says_what_is_missing(tmp_path: Path) -> None:
    make_plan(tmp_path, ARMS, [0, 1])
    make_job(tmp_path, "grpo", 0, [0.1, 0.2])
    make_job(tmp_path, "d64", 0, [0.3, 0.4], state="failed", kind="diverged", error="the gradient's norm is nan")
    make_job(tmp_path, "token_mean", 0, [0.3], state="failed", error="RuntimeError: no room")
    page, report = write_report(tmp_path)
    assert list(report.missing) == [
        "d64, seed 0: diverged at step 2: the gradient's norm is nan",
        "token_mean, seed 0: failed at step 1: RuntimeError: no room",
        "grpo, seed 1: not started",
        "d64, seed 1: not started",
        "token_mean, seed 1: not started",
    ]
    text = page.read_text()
    assert "the gradient&#39;s norm is nan" in text
    assert "d64 and grpo share no finished seed: nothing can be said of mean reward" in text
    assert table(tmp_path)["reward_end", "d64"]["n"] == "0"
    assert "The first step&#39;s completions differ between arms (seeds 0)" in text


def test_one_seed_has_no_interval_and_nothing_finished_no_table(tmp_path: Path) -> None:
    make_finished(tmp_path / "one", [0])
    text = write_report(tmp_path / "one")[0].read_text()
    assert "with one seed: no interval exists, so nothing can be concluded" in text
    assert table(tmp_path / "one")["reward_end", "d64"]["t_low"] == ""
    make_plan(tmp_path / "none", ARMS, [0])
    assert "Nothing yet: no job has finished." in write_report(tmp_path / "none")[0].read_text()


def test_token_weights_are_the_papers(tmp_path: Path) -> None:
    """Two completions of 2 and 6 tokens: 1/(2*2) and 1/(2*6); 1/(2*64); 1/8."""
    make_finished(tmp_path, [0])
    frozen = freeze(tmp_path / "grpo/seed-0", "grpo", 0)
    weights = {arm: token_weights(frozen, tmp_path / arm / "seed-0", arm) for arm in ARMS}
    assert (weights["grpo"].shortest, weights["grpo"].longest) == (1 / 4, 1 / 12)
    assert (weights["d64"].shortest, weights["d64"].longest) == (1 / 128, 1 / 128)
    assert (weights["token_mean"].shortest, weights["token_mean"].longest) == (1 / 8, 1 / 8)
    assert all(w.deviation <= 2**-52 for w in weights.values())


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["rlpost-report", str(tmp_path)])

    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, *capsys.readouterr()) == (
        2,
        "",
        f"rlpost-report: {tmp_path}: there is no sweep here (no sweep.json)\n",
    )
    make_plan(tmp_path, ARMS, [0])
    make_job(tmp_path, "grpo", 0, [0.1])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert out.splitlines()[0] == "d64, seed 0: not started"
    assert out.splitlines()[-1] == f"report: {tmp_path / 'report/report.html'}"


def test_the_sweeps_mlflow_run_holds_the_report_and_its_children(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracking = {"uri": uri, "experiment": "e", "artifacts": str(tmp_path / "artifacts")}
    plan = replace(make_finished(tmp_path), tracking=tracking)
    run_id = parent_run.open_run(plan, tmp_path, {"git.commit": "abc"})
    assert run_id is not None
    plan = replace(plan, mlflow_run_id=run_id)
    plan.write(tmp_path)
    client = mlflow.MlflowClient(tracking_uri=uri)
    child = client.create_run(client.get_experiment_by_name("e").experiment_id).info.run_id
    status = tmp_path / "d64/seed-0/status.json"
    status.write_text(status.read_text().replace("{", f'{{"mlflow_run_id": "{child}", ', 1))

    page, _ = write_report(tmp_path)
    parent_run.close_run(plan, "FAILED")
    parent = client.get_run(run_id)
    assert (parent.info.run_name, parent.info.status) == ("sweep by_hand", "FAILED")
    assert {
        "sweep": "by_hand",
        "arms": "grpo, d64, token_mean",
        "git.commit": "abc",
    }.items() <= parent.data.tags.items()
    assert parent.data.metrics["d64/reward_end"] == pytest.approx(0.45)
    assert parent.data.metrics["d64/reward_end_difference"] == pytest.approx(0.25)
    assert parent.data.metrics["jobs/finished"] == 9
    assert {"report/report.html", "report/table.csv", "report/reward.png"} <= {
        f.path for f in client.list_artifacts(run_id, "report")
    }
    assert client.get_run(child).data.tags["mlflow.parentRunId"] == run_id
    assert f"/runs/{child}" in page.read_text()
    assert parent_run.open_run(plan, tmp_path, {}) == run_id  # a resume goes on with it
    assert client.get_run(run_id).info.status == "RUNNING"


def test_a_store_that_is_away_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracking = {"uri": "http://127.0.0.1:9", "experiment": "e", "artifacts": None}
    plan = replace(make_finished(tmp_path, [0]), tracking=tracking)
    assert parent_run.open_run(plan, tmp_path, {}) is None
    replace(plan, mlflow_run_id="gone").write(tmp_path)
    page, _ = write_report(tmp_path)
    assert page.is_file()
    assert "MLflow at http://127.0.0.1:9" in caplog.text


def test_a_directory_without_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no sweep here"):
        write_report(tmp_path)
