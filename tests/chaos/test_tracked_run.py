"""Test of trackers through growth, a killed worker, half a minute without MLflow's server, a killed driver, and a resubmission."""

import signal
import time
from pathlib import Path

import pytest
from chaos_kit import SLOW_S, Running, command, have_nodes, release, wrapped
from mlflow_server import mlflow_server
from trackers_kit import assert_on_tensorboard, first_commits, values_by_step

from undula.state.events import CheckpointEvent, StartEvent, TrackerEvent
from undula.state.ledger import read_ledger
from undula.state.processes import send_signal
from undula.storage import open_store
from undula.testing.chaos import Chaos, start_driver
from undula.testing.faults import parse_faults
from undula.testing.nodes import Nodes

STEPS = 1400
"""Number of steps of the run, which take longer at the slow pace than everything that happens to it. The rest is trained at full speed."""
OUTAGE_S = 30.0

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]


def test_mlflow_and_wandb_show_one_run_with_the_first_commit_of_every_step(
    spot: Nodes, text: str, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    have_nodes(spot, 1)
    with mlflow_server(tmp_path) as server:
        trackers = (f"trackers.mlflow.uri={server.url}", "trackers.wandb.mode=offline")
        # Without snapshots, the resubmission repeats the steps since the newest checkpoint.
        settings = (f"plan.max_steps={STEPS}", "workers.max=2", "checkpoint.snapshot_every_steps=0", *trackers)
        job = command(text, str(tmp_path), "run", *settings, script=wrapped(tmp_path, pace_s=SLOW_S))
        driver = start_driver(job, spot.cluster, print)
        run = Running(driver, open_store(f"{tmp_path}/run"))
        try:
            run.wait_for(lambda: len(run.rows()) > 20)
            spot.add()
            run.wait_for(lambda: 2 in run.sizes())
            run.wait_for(lambda: bool(server.runs() and server.history("undula.step")))
            server.stop()
            began = time.monotonic()
            (kill,) = parse_faults("at step 1: sigkill worker 1")
            groups = len(run.of(StartEvent))
            assert Chaos(spot, run.store, driver).inject(kill)
            run.wait_for(lambda: len(run.of(StartEvent)) > groups)
            run.wait_for(lambda: is_down(run))
            run.wait_for(lambda: time.monotonic() - began > OUTAGE_S)
            run.wait_for(lambda: lost_by_a_kill(run) > 10)
            send_signal(driver.process, signal.SIGKILL)
        finally:
            driver.stop()
        before = len(run.rows())
        second = Running(start_driver(job, spot.cluster, print), run.store)
        try:
            # MLflow gets steps that have been committed twice meanwhile.
            second.wait_for(lambda: len(read_ledger(run.store).replaced) > 10 and len(run.rows()) > before)
            server.start()
            second.wait_for(lambda: not is_down(run))
            release(tmp_path)
            assert second.driver.process.wait(400) == 0, second.driver.lines[-5:]
        finally:
            second.driver.stop()

        ledger = read_ledger(run.store)
        first = first_commits(ledger)
        assert sorted(first) == list(range(1, STEPS + 1))
        assert {event.tracker for event in run.of(TrackerEvent)} == {"MLflow"}
        shown = server.only_run()
        assert shown.info.status == "FINISHED"
        assert int(shown.data.tags["undula.events.resize"]) > 0
        assert int(shown.data.tags["undula.events.crash"]) > 0
        by_step = sorted(first.items())
        assert server.history("undula.step") == [(step, float(step)) for step in range(STEPS + 1)]
        assert server.history("lr") == [(step, row["lr"]) for step, row in by_step]
        assert server.history("loss/train") == [(step, row["loss"]) for step, row in by_step]
        assert server.times("loss/train") == [(step, round(1000 * row["time"])) for step, row in by_step]

    assert_on_tensorboard(run.store)
    assert len(list(Path(run.store.path("trackers")).glob("wandb/offline-run-*"))) == 2
    begin, *rows = values_by_step(Path(run.store.path("trackers")))
    assert begin[0] == 0  # the validation before the first step
    assert [(step, row["loss/train"], row["_timestamp"]) for step, row in rows] == [
        (step, row["loss"], row["time"]) for step, row in by_step
    ]


def is_down(run: Running) -> bool:
    """Return whether a tracker is out of reach according to the newest event about it."""
    events = run.of(TrackerEvent)
    return bool(events and events[-1].problem)


def lost_by_a_kill(run: Running) -> int:
    """Return the number of steps in the ledger after the newest checkpoint, which a killed job repeats."""
    saved = [event.step or 0 for event in run.of(CheckpointEvent)]
    return len(run.rows()) - max(saved, default=0)
