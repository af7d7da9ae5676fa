"""An MLflow run, fed by a thread from what metrics.jsonl has.

A slow or absent server never holds up or ends a run. What it missed is sent when it is back, now or on a resume, and named if
it never comes back.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.record.completions import trace_attributes
from rlpost.record.mlflow_store import Status, experiment_id, open_client
from rlpost.types import Rollout

log = logging.getLogger(__name__)

Metrics = Mapping[str, float | None]


class MlflowSink:
    """A thread that feeds one MLflow run, in order, trying again for as long as the store does not answer.

    Args:
        uri: an MLflow tracking URI.
        experiment: made if it does not exist.
        run_id: an existing run to go on with, on a resume.
        parent_run_id: the run to show it under.
        patience_s: how long `close` waits for a store that does not answer.
    """

    RETRY_S = 5.0

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        files: Sequence[Path] = (),
        artifacts: str | None = None,
        run_id: str | None = None,
        parent_run_id: str | None = None,
        patience_s: float = 30.0,
    ) -> None:
        self.run_id = run_id
        self._uri = uri
        self._experiment = experiment
        self._run_name = run_name
        self._params = dict(params)
        self._tags = dict(tags) | ({"mlflow.parentRunId": parent_run_id} if parent_run_id else {})
        self._artifacts = artifacts
        self._patience_s = patience_s
        self._client: Any = None
        self._experiment_id = ""
        self._sent_steps: set[int] = set()
        self._queue: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue()
        self._deadline = math.inf
        self._missed: list[str] = []
        self._connected = threading.Event()
        self._put("the run's parameters", self._open)
        for file in files:
            self.file(file)
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()
        # The run id belongs into the first checkpoint; a store that answers gives it within seconds.
        self._connected.wait(timeout=20)

    def metrics(self, step: int, metrics: Metrics) -> None:
        self._put(f"step {step}", lambda: self._send_metrics(step, metrics))

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        name = f"completions/step-{step:06d}.json"
        self._put(name, lambda: self._client.log_table(self.run_id, columns, name))

    def traces(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Rollouts as traces of the run: prompt and completion, and each reward as an assessment."""
        for rollout in rollouts:
            name = f"the trace of step {step}, group {rollout.prompt.group_id}, sample {rollout.sample_index}"
            self._put(name, lambda rollout=rollout: self._send_trace(step, rollout))

    def file(self, path: Path) -> None:
        self._put(path.name, lambda: self._client.log_artifact(self.run_id, str(path)))

    def close(self, status: Status) -> None:
        self._put(f"the status {status}", lambda: self._client.set_terminated(self.run_id, status))
        self._queue.put(None)
        self._deadline = time.monotonic() + self._patience_s
        self._thread.join(timeout=self._patience_s + 60)
        if self._missed:
            log.warning(
                "MLflow at %s did not answer; it lacks %s (metrics.jsonl has every step; a resume sends them)",
                *(self._uri, ", ".join(self._missed)),
            )

    def _put(self, what: str, action: Callable[[], None]) -> None:
        self._queue.put((what, action))

    def _work(self) -> None:
        told = False
        while (item := self._queue.get()) is not None:
            what, action = item
            while True:
                try:
                    action()
                    if told:
                        log.info("MLflow at %s answers again", self._uri)
                    told = False
                    break
                except Exception as error:  # any failure of the store: the run goes on
                    if not told:
                        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                        log.warning("MLflow at %s: %s; training goes on, the gap is kept", self._uri, reason)
                        told = True
                if time.monotonic() > self._deadline:
                    self._missed.append(what)
                    break
                time.sleep(min(self.RETRY_S, max(0.1, self._deadline - time.monotonic())))

    def _open(self) -> None:
        """Find or make the experiment and the run."""
        self._client = open_client(self._uri)
        import mlflow
        from mlflow.entities import Param, RunTag

        mlflow.set_tracking_uri(self._uri)  # traces and their assessments know no other way

        if self.run_id is not None:
            self._client.update_run(self.run_id, status="RUNNING")
            self._experiment_id = self._client.get_run(self.run_id).info.experiment_id
            history = self._client.get_metric_history(self.run_id, "tokens/total")
            self._sent_steps = {metric.step for metric in history}
        else:
            self._experiment_id = experiment_id(self._client, self._experiment, self._artifacts)
            self.run_id = self._client.create_run(self._experiment_id, run_name=self._run_name).info.run_id
            params = [Param(key, str(value)[:6000]) for key, value in self._params.items()]
            for start in range(0, len(params), 100):  # the server's limit a call
                self._client.log_batch(self.run_id, params=params[start : start + 100])
        self._client.log_batch(self.run_id, tags=[RunTag(k, v) for k, v in self._tags.items()])
        self._connected.set()

    def _send_trace(self, step: int, rollout: Rollout) -> None:
        import mlflow
        from mlflow.entities import AssessmentSource

        completion, answer = rollout.completion, rollout.prompt.example.answer
        span = self._client.start_trace(
            "rollout",
            inputs={"prompt": rollout.prompt.text},
            attributes=trace_attributes(rollout, step),
            tags={"step": str(step), "group_id": str(rollout.prompt.group_id)},
            experiment_id=self._experiment_id,
            run_id=self.run_id,
        )
        outputs: dict[str, Any] = {"completion": completion.text}
        if completion.messages:
            outputs["episode"] = [f"{message['role']}: {message['content']}" for message in completion.messages]
        self._client.end_trace(span.trace_id, outputs=outputs)
        if answer is not None:
            mlflow.log_expectation(trace_id=span.trace_id, name="answer", value=answer)
        rewards = {"reward": rollout.reward, **{f"reward/{name}": value for name, value in rollout.rewards.items()}}
        for name, value in rewards.items():
            if math.isfinite(value):
                source = AssessmentSource("CODE", name.replace("/", "."))
                mlflow.log_feedback(trace_id=span.trace_id, name=name, value=value, source=source)

    def _send_metrics(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        if step in self._sent_steps:
            return
        now = int(time.time() * 1000)
        batch = [Metric(name, value, now, step) for name, value in metrics.items() if value is not None]
        self._client.log_batch(self.run_id, metrics=batch)
        self._sent_steps.add(step)
