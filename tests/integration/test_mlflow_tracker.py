"""Tests of MLflow as a tracker, with MLflow's own server: real HTTP, and what a user would see there."""

import http.server
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ledger_rows import Rows
from mlflow_server import MlflowServer, mlflow_server
from trackers_kit import TAGS, Followed
from waiting import wait_until

from undula.errors import SpecError
from undula.storage import Store
from undula.telemetry.tracker import TrackedRun, TrackedStep
from undula.telemetry.trackers.mlflow import MlflowSpec, MlflowTracker

PARAMETERS = {f"config.layer{number}": str(number) for number in range(150)} | {"config.text": "x" * 9000}
RUN = TrackedRun("0123abcd", "run", "/runs/run", 100.0, PARAMETERS)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture
def server(shared: MlflowServer) -> MlflowServer:
    """Server without a run of the experiment."""
    client = shared.client()
    if experiment := client.get_experiment_by_name("undula"):
        for run in client.search_runs([experiment.experiment_id]):
            client.delete_run(run.info.run_id)
    return shared


def test_each_step_is_there_once_through_an_outage_a_resubmission_and_replayed_steps(
    server: MlflowServer, tmp_path: Path
) -> None:
    store = Store(str(tmp_path))
    first = Followed(store, MlflowTracker(MlflowSpec(uri=server.url)), run=RUN)
    first.rows.add(4)
    wait_until(lambda: first.follower.newest == 3)
    server.stop()
    first.rows.add(5)
    wait_until(lambda: len(first.reports) == 1)
    server.start()
    wait_until(lambda: first.follower.newest == 8)
    later = Rows(store, attempt=2)
    later.count = 6
    later.add(6)  # repeats the steps from the sixth on
    wait_until(lambda: first.follower.newest == 11)
    assert [newest for _, _, newest in first.reports] == [3, 8]

    assert Followed(store, MlflowTracker(MlflowSpec(uri=server.url)), later, RUN).end()
    run = server.only_run()
    assert server.history("loss/train") == [(step, 1.0) for step in range(1, 13)]
    assert server.history("undula.step") == [(step, float(step)) for step in range(1, 13)]
    assert (run.info.run_name, run.info.status) == ("run", "FAILED")
    assert (run.data.params["config.layer0"], run.data.params["config.layer149"]) == ("0", "149")
    assert run.data.tags.items() >= {"undula.run_id": "0123abcd", **TAGS}.items()
    first.end()


def test_a_request_that_is_repeated_because_its_answer_was_lost_adds_nothing(server: MlflowServer) -> None:
    tracker = MlflowTracker(MlflowSpec(uri=server.url))
    assert tracker.open(RUN) is None
    step = TrackedStep(3, 12.3456, {"loss/train": 1.5, "grad_norm": math.nan, "logged/scale": math.inf})
    for _ in range(2):
        tracker.send([step])
    assert tracker.open(RUN) == 3
    for name in ("loss/train", "grad_norm", "logged/scale", "undula.step"):
        assert [step for step, _ in server.history(name)] == [3]
    tracker.close("stopped")
    assert server.only_run().info.status == "KILLED"
    assert tracker.open(RUN) == 3
    assert server.only_run().info.status == "RUNNING"


def test_steps_with_many_values_and_odd_names_are_accepted(server: MlflowServer) -> None:
    tracker = MlflowTracker(MlflowSpec(uri=server.url))
    tracker.open(RUN)
    values = {f"logged/value{number}": float(number) for number in range(1200)}
    tracker.send([TrackedStep(1, 1.0, {**values, "logged/α=1%": 2.0, "../up//down": 3.0}), TrackedStep(2, 2.0, {})])
    metrics = server.only_run().data.metrics
    assert len(metrics) == 1203
    assert (metrics["undula.step"], metrics["logged/α_1_"], metrics["up/down"]) == (2.0, 2.0, 3.0)


@contextmanager
def answering(status: int) -> Iterator[str]:
    """Serve every request with an HTTP status, and return the URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://me:planted@127.0.0.1:{server.server_port}"
        server.shutdown()


def test_refused_credentials_are_one_sentence_without_the_password_and_a_server_that_is_down_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mlflow")
    for status in (401, 403):
        with answering(status) as url, pytest.raises(SpecError) as caught:
            MlflowTracker(MlflowSpec(uri=url)).check()
        assert str(caught.value).startswith(
            f"uri: the server at http://{url.partition('@')[2]} refuses the credentials"
        )
        assert "planted" not in str(caught.value)
    MlflowTracker(MlflowSpec(uri="http://127.0.0.1:9")).check()

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(SpecError, match=r"^uri is missing, and MLFLOW_TRACKING_URI is not the URL of a server"):
        MlflowTracker(MlflowSpec()).check()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    MlflowTracker(MlflowSpec()).check()
