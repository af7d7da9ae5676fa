"""The sweep's own MLflow run: its jobs' runs are shown under it, and it holds the report's figures and files."""

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlpost.record import mlflow_store
from rlpost.record.mlflow_store import Status
from rlpost.sweep.arms import Plan

log = logging.getLogger(__name__)


def open_run(plan: Plan, sweep_dir: Path, tags: Mapping[str, str]) -> str | None:
    """Make the sweep's run, or mark the one it has as running. Returns: its id; None where the store does not answer."""
    uri = plan.tracking.get("uri")
    if not uri:
        return None
    try:
        client = mlflow_store.open_client(uri)
        if plan.mlflow_run_id:
            client.update_run(plan.mlflow_run_id, status="RUNNING")
            return plan.mlflow_run_id
        experiment = mlflow_store.experiment_id(client, str(plan.tracking["experiment"]), plan.tracking["artifacts"])
        own = {"sweep": plan.name, "sweep_dir": str(sweep_dir), "arms": ", ".join(plan.arms), **tags}
        return client.create_run(experiment, run_name=f"sweep {plan.name}", tags=own).info.run_id
    except Exception as error:  # a store that is away does not keep the jobs from running
        _warn(uri, error)
        return plan.mlflow_run_id


def close_run(plan: Plan, status: Status) -> None:
    """Give the sweep's run its final status."""
    uri = plan.tracking.get("uri")
    if not uri or not plan.mlflow_run_id:
        return
    try:
        mlflow_store.end_run(uri, plan.mlflow_run_id, status)
    except Exception as error:
        _warn(uri, error)


def publish(plan: Plan, metrics: Mapping[str, float], files: Iterable[Path], children: Iterable[str]) -> None:
    """Metrics and files of the report into the sweep's run; the jobs' runs under it, if they did not know it."""
    uri = plan.tracking.get("uri")
    if not uri or not plan.mlflow_run_id:
        return
    try:
        client = mlflow_store.open_client(uri)
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        client.log_batch(plan.mlflow_run_id, metrics=[Metric(name, value, now, 0) for name, value in metrics.items()])
        for file in files:
            client.log_artifact(plan.mlflow_run_id, str(file), "report")
        for child in children:
            client.set_tag(child, "mlflow.parentRunId", plan.mlflow_run_id)
    except Exception as error:
        _warn(uri, error)


def links(plan: Plan, children: Iterable[str]) -> dict[str, str]:
    """The addresses at which MLflow shows runs, by a child's id or "sweep". Empty where the store does not answer.

    An embedded store has an address while `make ui` serves it.
    """
    uri = plan.tracking.get("uri")
    if not uri or not plan.mlflow_run_id:
        return {}
    server = uri.rstrip("/") if uri.startswith("http") else "http://127.0.0.1:5000"
    try:
        experiment = mlflow_store.open_client(uri).get_run(plan.mlflow_run_id).info.experiment_id
    except Exception as error:
        _warn(uri, error)
        return {}
    runs = f"{server}/#/experiments/{experiment}/runs"
    return {"sweep": f"{runs}/{plan.mlflow_run_id}", **{child: f"{runs}/{child}" for child in children}}


def _warn(uri: str, error: Exception) -> None:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    log.warning("MLflow at %s: %s; the report's files are complete, rlpost-report sends them again", uri, reason)
