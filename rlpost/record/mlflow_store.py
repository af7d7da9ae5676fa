"""Access to an MLflow store that runs and sweeps share. Imports MLflow when it is first used."""

import logging
import os
from pathlib import Path
from typing import Any, Literal

# Some are read when MLflow is imported, and all processes of a run shall have the same. The client's own retries would block
# for minutes; a new store's migrations are no news; a trace must be there before its assessments, and the sink's own thread
# keeps the run from waiting.
for _name, _value in {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",
}.items():
    os.environ.setdefault(_name, _value)

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


def open_client(uri: str) -> Any:
    """An MlflowClient that gives up within seconds on a store that does not answer.

    An embedded store's directory is made if it is missing.
    """
    import mlflow

    # Its handler would print a store's tracebacks to the terminal; they belong where everything else is logged.
    own = logging.getLogger("mlflow")
    own.handlers.clear()
    own.propagate = True
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    return mlflow.MlflowClient(tracking_uri=uri)


def experiment_id(client: Any, name: str, artifacts: str | None) -> str:
    """The experiment of that name, made if there is none, with its artifacts under the directory `artifacts`."""
    found = client.get_experiment_by_name(name)
    if found:
        return found.experiment_id
    location = f"{Path(artifacts).as_uri()}/{name}" if artifacts else None
    return client.create_experiment(name, artifact_location=location)


def end_run(uri: str, run_id: str, status: Status) -> None:
    """Give an MLflow run the final status that its own process could not."""
    open_client(uri).set_terminated(run_id, status)
