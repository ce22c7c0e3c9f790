"""Test of trackers through growth, a killed worker, half a minute without the server, a killed driver, and a resubmission."""

import signal
import time
from pathlib import Path

import pytest
from chaos_kit import SLOW_S, Running, command, wrapped
from mlflow_server import mlflow_server

from undula.processes import send_signal
from undula.state.events import StartEvent, TrackerEvent
from undula.state.ledger import read_ledger
from undula.storage import open_store
from undula.testing.chaos import Chaos, start_driver
from undula.testing.faults import parse_faults
from undula.testing.nodes import Nodes

STEPS = 600
OUTAGE_S = 30.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def test_mlflow_and_wandb_show_one_run_with_every_step_once(spot: Nodes, text: str, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from undula.trackers.wandb_files import history_steps

    while len(spot.nodes) > 1:
        spot.kill(spot.nodes[0])
    spot.await_all()
    with mlflow_server(tmp_path) as server:
        settings = (f"plan.max_steps={STEPS}", "workers.max=2", f"trackers.mlflow.uri={server.url}")
        job = command(
            text,
            str(tmp_path),
            "run",
            *settings,
            "trackers.wandb.mode=offline",
            script=wrapped(tmp_path, pace_s=SLOW_S),
        )
        driver = start_driver(job, spot.cluster, print)
        run = Running(driver, open_store(f"{tmp_path}/run"))
        try:
            run.wait_for(lambda: len(run.rows()) > 20)
            spot.add()
            run.wait_for(lambda: 2 in run.sizes(), limit_s=240)
            server.stop()
            began = time.monotonic()
            (kill,) = parse_faults("at step 1: sigkill worker 1")
            assert Chaos(spot, run.store, driver).inject(kill)
            run.wait_for(lambda: len(run.of(StartEvent)) > 2)
            run.wait_for(lambda: len(run.of(TrackerEvent)) > 0)
            run.wait_for(lambda: time.monotonic() - began > OUTAGE_S)
            server.start()
            run.wait_for(lambda: len(run.of(TrackerEvent)) > 1)
            assert len(run.rows()) < STEPS - 100
            send_signal(driver.process, signal.SIGKILL)
        finally:
            driver.stop()
        second = start_driver(job, spot.cluster, print)
        try:
            assert second.process.wait(400) == 0, second.lines[-5:]
        finally:
            second.stop()

        ledger = read_ledger(run.store)
        assert ledger.steps["step"].to_pylist() == list(range(STEPS))
        shown = server.only_run()
        assert shown.info.status == "FINISHED"
        assert int(shown.data.tags["undula.events.resize"]) > 0
        assert int(shown.data.tags["undula.events.crash"]) > 0
        # Weights and losses are the same bits in every attempt, so the losses of the run are those of the first commits.
        losses = [(step, loss) for step, loss in server.history("loss/train") if step]
        assert losses == list(enumerate(ledger.steps["loss"].to_pylist(), 1))
        assert server.history("undula.step") == [(step, float(step)) for step in range(STEPS + 1)]
    files = sorted(Path(run.store.path("trackers")).glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert [step for file in files for step in history_steps(file)] == list(range(STEPS + 1))
