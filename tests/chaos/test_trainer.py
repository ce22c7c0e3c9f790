"""Test of a script with Hugging Face's Trainer under faults: the bits of a run left alone, and every sample once."""

import shutil
import signal
from pathlib import Path

import pytest
from alone import train_alone
from chaos_kit import PACE_S, Running, assert_certified, events_in, have_nodes

from undula.report.data.certificate import certify, data_of
from undula.report.data.run_record import read_run
from undula.state.events import CrashEvent, StartEvent, ValidationEvent
from undula.state.ledger import events_of, read_ledger
from undula.state.processes import descendants, is_alive, send_signal
from undula.storage import open_store
from undula.testing.chaos import Chaos, start_driver
from undula.testing.nodes import Nodes

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
JOB = Path(__file__).parent / "trainer_job.py"
STEPS_OF_EPOCH = 21


@pytest.mark.parametrize("loaders", [0, 2])
def test_faults_change_no_bit(spot: Nodes, tmp_path: Path, loaders: int) -> None:
    script = tmp_path / "job" / JOB.name
    script.parent.mkdir()
    shutil.copy(JOB, script)
    shutil.copy(JOB.with_suffix(".yaml"), script.with_suffix(".yaml"))
    have_nodes(spot, 1)
    arguments = f"config.arguments=--steps 100000 --pace {PACE_S} --loaders {loaders}"
    driver = start_driver(
        [spot.cluster.python, str(script), "name=run", f"runs={tmp_path}", arguments], spot.cluster, print
    )
    job = Running(driver, open_store(f"{tmp_path}/run"))
    try:
        job.wait_for(lambda: len(job.rows()) > 5)
        chaos = Chaos(spot, job.store, job.driver)
        second = spot.add()
        job.wait_for_group(2, after=0, steps=20)
        on_second = {process.pid for process in spot.processes_of(second)}
        (lost,) = [rank for rank in chaos.workers() if rank is not None and rank.pid in on_second]
        with_it = descendants(lost)
        send_signal(lost, signal.SIGKILL)
        job.wait_for(lambda: not any(is_alive(process) for process in with_it), limit_s=20)
        spot.kill(second)
        job.wait_for(lambda: job.of(StartEvent)[-1].world_size == 1 and len(job.of(StartEvent)) > 2)
        job.wait_for(lambda: len(job.rows()) > 2 * STEPS_OF_EPOCH)
        reached = len(job.rows())
        job.wait_for(lambda: len(job.rows()) > reached + 20)
    finally:
        driver.stop()
    ledger = read_ledger(job.store)
    steps = ledger.steps.num_rows
    assert [crash.cause for crash in events_in(job.store.url, CrashEvent)]
    assert ledger.replaced.num_rows == 0
    alone = train_alone(
        ["python", str(script), "name=alone", f"runs={tmp_path}", f"config.arguments=--steps {steps + 1}"]
    )
    assert_certified(job.store.url, alone.url, steps)
    run = read_run(job.store)
    assert any("each of 500 samples was used exactly once" in each for each in certify(run, data_of(run)).proved)
    expected = {event.step: event.loss for event in events_of(read_ledger(alone).events, ValidationEvent)}
    # The last one may be of a step whose row was not written when the run was stopped.
    found = {event.step: event.loss for event in events_of(ledger.events, ValidationEvent) if event.step <= steps}
    assert found == {step: loss for step, loss in expected.items() if step in found}
    assert set(range(15, steps, 15)) <= found.keys()
