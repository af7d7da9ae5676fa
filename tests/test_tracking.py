"""metrics.jsonl, completion files, and a real MLflow store: embedded, a server, and a server that goes away."""

import json
import logging
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlflow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf

from rlpost.cluster.ranks import LOST_PEERS, conclude
from rlpost.commands.run import _settle
from rlpost.config.schema import TrackingConfig
from rlpost.record.completions import load_rollouts, read_rollouts
from rlpost.record.metrics_file import MetricsFile
from rlpost.record.mlflow_sink import MlflowSink
from rlpost.record.rundir import RunDir
from rlpost.record.tracker import Tracker
from tests.conftest import make_rollout

ROLLOUTS = [make_rollout(text="7", answer="7", reward=1.0), make_rollout(1, text="8", sample_index=1)]


def make_sink(uri: str, tmp_path: Path, **settings: object) -> MlflowSink:
    return MlflowSink(
        uri, "exp", "run-1", params={"steps": 3, "reducer.divisor": 1000}, tags={"git.commit": "abc"},
        artifacts=str(tmp_path / "artifacts"), **settings,
    )  # fmt: skip


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/mlflow.db"


def test_metrics_are_lines_and_what_is_not_finite_is_null(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker(tmp_path, None, TrackingConfig())
    with caplog.at_level(logging.INFO):
        tracker.log(1, {"reward/mean": 0.5, "x": math.nan}, ROLLOUTS)
        tracker.log(2, {"reward/mean": 0.25, "x": math.inf}, ROLLOUTS)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "reward/mean": 0.5, "x": None},
        {"step": 2, "reward/mean": 0.25, "x": None},
    ]
    assert caplog.text.count("x is nan at step 1") == 1


def test_rollouts_come_back_from_the_completions_as_they_were_written(tmp_path: Path) -> None:
    plain, episode = (
        make_rollout(text=t, answer="7", reward=1.0, sampled_mask=m) for t, m in (("7", None), ("a", [1]))
    )
    plain.rewards, plain.trainer_logprobs = {"number": 1.0, "judge": math.nan}, torch.tensor([-0.25])
    episode.rewards = {"number": math.nan, "judge": 0.5}
    episode.reward_errors, episode.advantage, episode.is_trained_on = {"number": "raised: no; number"}, -0.5, False
    turns = ({"role": "assistant", "content": "a: b"}, {"role": "user", "content": ""})
    episode.completion = replace(episode.completion, messages=turns, environment_reward=0.25, policy_version=2)
    Tracker(tmp_path, None, TrackingConfig()).log(3, {}, [plain, episode])
    first, second = read_rollouts(tmp_path, 3)
    assert [r.rewards.keys() for r in (first, second)] == [{"judge", "number"}] * 2
    assert first.rewards["number"] == second.rewards["judge"] * 2 == 1.0
    assert math.isnan(first.rewards["judge"])
    assert math.isnan(second.rewards["number"])
    assert torch.equal(first.trainer_logprobs, torch.tensor([-0.25]))
    assert second.trainer_logprobs is None
    assert (second.reward_errors, second.advantage, second.is_trained_on) == (episode.reward_errors, -0.5, False)
    assert (first.completion, second.completion) == (plain.completion, episode.completion)
    assert [r.completion for r in load_rollouts(tmp_path, 3)] == [plain.completion]


def test_reasons_that_an_earlier_version_wrote_are_read(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, None, TrackingConfig())
    tracker.log(3, {}, ROLLOUTS)
    file = tmp_path / "completions" / "step-000003.parquet"
    table = pq.read_table(file)
    written = pa.array(["number raised: x; judge took over 10 s", ""])
    pq.write_table(table.set_column(table.column_names.index("reward_errors"), "reward_errors", written), file)
    first, second = read_rollouts(tmp_path, 3)
    assert first.reward_errors == {"number": "raised: x; judge took over 10 s"}
    assert second.reward_errors == {}


def test_completions_are_parquet(tmp_path: Path) -> None:
    Tracker(tmp_path, None, TrackingConfig()).log(3, {}, ROLLOUTS)
    rows = pq.read_table(tmp_path / "completions" / "step-000003.parquet").to_pylist()
    assert [row["completion"] for row in rows] == ["7", "8"]
    assert rows[0]["token_ids"] == [8, 9]
    assert rows[0]["reward"] == 1.0
    assert rows[1]["group_id"] == 1


def test_a_resume_drops_later_lines_and_a_line_cut_short(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 5):
        metrics.append(step, {"a": 0.1 * step})
    before = metrics._path.read_text().splitlines(keepends=True)
    with metrics._path.open("a") as file:
        file.write('{"step": 5, "a"')
    assert [row["step"] for row in metrics.rows()] == [1, 2, 3, 4]
    metrics.keep_until(2)
    assert metrics._path.read_text() == "".join(before[:2])


def test_mlflow_gets_everything(sqlite: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    tracker = Tracker(
        tmp_path, make_sink(sqlite, tmp_path, files=[tmp_path / "config.yaml"]), TrackingConfig(completions_every=2)
    )
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": step / 4, "tokens/total": step, "bad": math.nan}, ROLLOUTS)
    tracker.close("FINISHED")

    client = mlflow.MlflowClient(tracking_uri=sqlite)
    run = client.get_run(tracker.mlflow_run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run-1"
    assert run.data.params == {"steps": "3", "reducer.divisor": "1000"}
    assert run.data.tags["git.commit"] == "abc"
    history = client.get_metric_history(tracker.mlflow_run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert "bad" not in run.data.metrics
    files = {f.path for f in client.list_artifacts(tracker.mlflow_run_id)}
    assert files == {"config.yaml", "completions"}
    tables = [f.path for f in client.list_artifacts(tracker.mlflow_run_id, "completions")]
    assert tables == ["completions/step-000001.json", "completions/step-000002.json"]
    local = client.download_artifacts(tracker.mlflow_run_id, tables[0], str(tmp_path))
    assert "completion" in json.loads(Path(local).read_text())["columns"]


def test_a_trace_of_an_episode_has_its_turns(sqlite: str, tmp_path: Path) -> None:
    episode = replace(
        ROLLOUTS[0].completion,
        messages=({"role": "assistant", "content": "I ask."}, {"role": "user", "content": "= 7"}),
    )
    tracker = Tracker(tmp_path, make_sink(sqlite, tmp_path), TrackingConfig(completions_every=1, traces=2))
    tracker.log(1, {"x": 1.0}, [replace(ROLLOUTS[0], completion=episode), ROLLOUTS[1]])
    tracker.close("FINISHED")
    client = mlflow.MlflowClient(tracking_uri=sqlite)
    experiment = client.get_run(tracker.mlflow_run_id).info.experiment_id
    traces = client.search_traces(locations=[experiment], run_id=tracker.mlflow_run_id)
    outputs = {trace.data.spans[0].attributes["group_id"]: trace.data.spans[0].outputs for trace in traces}
    assert outputs == {
        0: {"completion": "7", "episode": ["assistant: I ask.", "user: = 7"]},
        1: {"completion": "8"},
    }


def test_a_store_that_fails_prints_no_traceback(
    sqlite: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(tmp_path, make_sink(sqlite, tmp_path, patience_s=1), TrackingConfig())
    with sqlite3.connect(sqlite.removeprefix("sqlite:///")) as store:
        store.execute("DROP TABLE metrics")
    with caplog.at_level(logging.WARNING):
        tracker.log(1, {"x": 1.0}, [])
        tracker.close("FINISHED")
    assert "no such table: metrics" in caplog.text  # in run.log
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_the_final_status_tells_the_truth(status: str, sqlite: str, tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, make_sink(sqlite, tmp_path), TrackingConfig())
    tracker.close(status)
    assert mlflow.MlflowClient(tracking_uri=sqlite).get_run(tracker.mlflow_run_id).info.status == status


def test_a_resume_goes_on_in_the_same_run_and_fills_its_gap(sqlite: str, tmp_path: Path) -> None:
    first = Tracker(tmp_path, make_sink(sqlite, tmp_path), TrackingConfig())
    first.log(1, {"a": 1.0, "tokens/total": 1}, ROLLOUTS)
    first.close("KILLED")
    MetricsFile(tmp_path / "metrics.jsonl").append(2, {"a": 2.0, "tokens/total": 2})  # MLflow was away for this one
    MetricsFile(tmp_path / "metrics.jsonl").append(3, {"a": 9.0, "tokens/total": 3})  # after the checkpoint

    second = Tracker(tmp_path, make_sink(sqlite, tmp_path, run_id=first.mlflow_run_id), TrackingConfig())
    second.resume_after(2)
    second.log(3, {"a": 3.0, "tokens/total": 3}, ROLLOUTS)
    second.close("FINISHED")
    client = mlflow.MlflowClient(tracking_uri=sqlite)
    history = client.get_metric_history(first.mlflow_run_id, "a")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert client.get_run(first.mlflow_run_id).info.status == "FINISHED"


class Server:
    """A real MLflow server on the loopback interface that can be stopped and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = f"sqlite:///{self.directory}/server.db"
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        options = [
            "--backend-store-uri",
            store,
            "--artifacts-destination",
            str(self.directory / "kept"),
            "--workers",
            "1",
        ]
        with (self.directory / "server.log").open("ab") as log:
            environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # eight processes less to start
            self.process = subprocess.Popen(
                [*command, *options], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        for _ in range(120):
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.5)
        raise TimeoutError((self.directory / "server.log").read_text())

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back_gets_what_it_missed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MlflowSink, "RETRY_S", 0.5)
    sink = MlflowSink(server.uri, "exp", "r", params={}, tags={}, patience_s=60)
    tracker = Tracker(tmp_path, sink, TrackingConfig())
    tracker.log(1, {"a": 1.0}, ROLLOUTS)
    while sink._queue.unfinished_tasks and not sink._queue.empty():
        time.sleep(0.1)
    server.stop()
    with caplog.at_level(logging.INFO):
        started = time.monotonic()
        for step in (2, 3):
            tracker.log(step, {"a": float(step)}, ROLLOUTS)
        assert time.monotonic() - started < 5  # training does not wait for the server
        time.sleep(2)
        server.start()
        tracker.close("FINISHED")
    assert "training goes on" in caplog.text
    client = mlflow.MlflowClient(tracking_uri=server.uri)
    assert [m.value for m in client.get_metric_history(sink.run_id, "a")] == [1.0, 2.0, 3.0]
    assert client.get_run(sink.run_id).info.status == "FINISHED"


@pytest.mark.slow
def test_a_server_that_stays_away_is_named(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = MlflowSink(server.uri, "exp", "r", params={}, tags={}, patience_s=1)
    tracker = Tracker(tmp_path, sink, TrackingConfig())
    server.stop()
    with caplog.at_level(logging.WARNING):
        tracker.log(1, {"a": 1.0}, ROLLOUTS)
        tracker.close("FINISHED")
    assert "it lacks" in caplog.text
    assert "the status FINISHED" in caplog.text
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_a_rank_that_was_killed_leaves_no_running_run_in_mlflow(sqlite: str, tmp_path: Path) -> None:
    """The launcher says in status.json which rank it was; the rank itself could not tell MLflow."""
    client = mlflow.MlflowClient(tracking_uri=sqlite)
    run_id = client.create_run(client.create_experiment("e")).info.run_id
    run = RunDir(tmp_path)
    run.set_state("running", mlflow_run_id=run_id)
    assert conclude({0: -signal.SIGKILL, 1: LOST_PEERS}, run) == 1
    _settle(run, OmegaConf.create({"tracking": {"uri": sqlite}}), 1)
    assert client.get_run(run_id).info.status == "FAILED"
    assert run.status()["error"] == "rank 0 was ended by SIGKILL"
