"""MLflow as a tracker. The run there carries the run's id as a tag, and the number of its newest step as a metric.

MLflow stores a metric once for each key, timestamp, step and value, and deletes none. All values of a step are sent with the time of its
commit, so a request that is repeated because its answer was lost adds nothing.
"""

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import MinLen
from pydantic import StringConstraints
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT, SpecError, needs_extra
from undula.telemetry.tracker import Entry, RunState, TrackedRun, TrackedStep

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

T = TypeVar("T")

URI_VARIABLE = "MLFLOW_TRACKING_URI"
RUN_TAG = "undula.run_id"
"""Tag with the id of the run."""
STEP_METRIC = "undula.step"
"""Metric with the number of committed steps. It comes after all other metrics of its step."""
MOST_METRICS, MOST_TAGS = 1000, 100
"""Maximum numbers of metrics, and of parameters or tags, in a request (MLflow's REST API, runs/log-batch)."""
MOST_NAME = 250
"""Maximum length of the name of a metric, a parameter or a tag."""
REQUEST_S = 10
"""Maximum time in seconds for a request."""
REFUSED = (401, 403)
"""HTTP statuses with which a server refuses credentials."""
STATUSES: Mapping[RunState, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


@checked_dataclass(frozen=True, config=STRICT)
class MlflowSpec:
    """MLflow, for which `pip install 'undula[mlflow]'` installs the client."""

    uri: Annotated[str, StringConstraints(pattern=r"^https?://")] | None = None
    """URL of the server; by default, the environment variable MLFLOW_TRACKING_URI of the job. Credentials come from MLflow's own variables,
    such as MLFLOW_TRACKING_TOKEN."""
    experiment: Annotated[str, MinLen(1)] = "undula"
    """Name of the experiment, which is created if it does not exist."""


class MlflowTracker:
    """Run of an MLflow server.

    Args:
        spec: Settings of the job.
    """

    name = "MLflow"

    def __init__(self, spec: MlflowSpec):
        self._uri = spec.uri or os.environ.get(URI_VARIABLE, "")
        self._experiment = spec.experiment
        self._run_id = ""

    def check(self) -> None:
        """Check that MLflow is installed, that a server is named, and that it does not refuse the credentials."""
        with needs_extra("mlflow"):
            from mlflow.exceptions import MlflowException
        if not self._uri.startswith(("http://", "https://")):
            raise SpecError(
                f"uri is missing, and {URI_VARIABLE} is not the URL of a server; set uri, or give the job the variable with --env"
            )
        try:
            self._client().search_experiments(max_results=1)
        except MlflowException as error:
            if error.get_http_status_code() in REFUSED:
                raise SpecError(
                    f"uri: the server at {re.sub('//[^/@]*@', '//', self._uri)} refuses the credentials of the job or got none; give it "
                    "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, with --secret"
                ) from None

    def open(self, run: TrackedRun) -> int | None:
        from mlflow.entities import Param

        client, experiment = self._client(), self._experiment_id()
        runs = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
        if runs:
            client.update_run(runs[0].info.run_id, status="RUNNING")
        record = runs[0] if runs else client.create_run(
            experiment, start_time=_milliseconds(run.began), tags={RUN_TAG: run.id}, run_name=run.name
        )  # fmt: skip
        self._run_id = record.info.run_id
        # MLflow refuses another value for a parameter that it has.
        given = {_name(key): value for key, value in run.parameters.items()}
        missing = [Param(key, value) for key, value in given.items() if key not in record.data.params]
        for params in _chunks(missing, MOST_TAGS):
            client.log_batch(self._run_id, params=params)
        newest = record.data.metrics.get(STEP_METRIC)
        return None if newest is None else int(newest)

    def send(self, steps: Sequence[TrackedStep]) -> None:
        client = self._client()
        for metrics in _chunks([metric for step in steps for metric in _metrics(step)], MOST_METRICS):
            client.log_batch(self._run_id, metrics=metrics)

    def describe(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        client = self._client()
        for some in _chunks([RunTag(_name(key), value) for key, value in tags.items()], MOST_TAGS):
            client.log_batch(self._run_id, tags=some)

    def close(self, state: RunState) -> None:
        self._client().set_terminated(self._run_id, STATUSES[state])

    def _client(self) -> "MlflowClient":
        # MLflow's own retries would hold the thread for minutes. It reads its variables with each request.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REQUEST_S))
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self._uri)

    def _experiment_id(self) -> Any:
        client = self._client()
        experiment = client.get_experiment_by_name(self._experiment)
        return experiment.experiment_id if experiment else client.create_experiment(self._experiment)


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _metrics(step: TrackedStep) -> list["Metric"]:
    """Return the metrics of a step. The one that says that MLflow has the step comes last."""
    from mlflow.entities import Metric

    values = {_name(name): value for name, value in step.values.items()} | {STEP_METRIC: float(step.step)}
    return [Metric(name, value, _milliseconds(step.time), step.step) for name, value in values.items()]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _name(name: str) -> str:
    """Return a name in the form that MLflow accepts: a relative path of letters, digits and a few signs."""
    path = posixpath.normpath(re.sub(r"[^/\w.\- ]", "_", name)).lstrip("./")
    return path[:MOST_NAME] or "_"


ENTRY = Entry(lambda spec, _: MlflowTracker(spec), MlflowSpec)
