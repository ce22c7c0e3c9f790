"""Test of a script for Accelerate under faults: the bits of a run left alone, each sample once, and each evaluation once."""

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from alone import train_alone
from chaos_kit import Running, assert_certified, events_in, have_nodes

from undula.report.data.certificate import certify, data_of
from undula.report.data.run_record import read_run
from undula.state.events import CrashEvent, LogEvent, StartEvent
from undula.state.ledger import events_of, read_ledger
from undula.state.processes import send_signal
from undula.storage import open_store
from undula.testing.chaos import Chaos, start_driver
from undula.testing.nodes import Nodes

pytestmark = [pytest.mark.timeout(500), pytest.mark.nightly]
SCRIPT = Path(__file__).parents[1] / "migration" / "accelerate_after.py"
STEPS_OF_EPOCH = 4


def command(folder: Path, name: str, *overrides: str) -> list[str]:
    """Return the command of the job, whose script is in a folder of its own because the modules beside it go with it."""
    script, output = folder / "job" / SCRIPT.name, folder / f"{name}-output"
    if not script.exists():
        script.parent.mkdir()
        shutil.copy(SCRIPT, script)
        shutil.copy(SCRIPT.with_suffix(".yaml"), script.with_suffix(".yaml"))
    output.mkdir()
    arguments = f"--output_dir {output} --epochs 100000 --shuffle --dropout 0.1 --delay_s 0.01"
    return [sys.executable, str(script), f"name={name}", f"runs={folder}", f"config.arguments={arguments}", *overrides]


def evaluations(job: Running) -> list[tuple[int, Any]]:
    """Return what the script has logged after each epoch, by step."""
    return [(each.step, each.values) for each in events_of(read_ledger(job.store).events, LogEvent)]


def test_faults_change_no_bit_of_a_script_for_accelerate(spot: Nodes, tmp_path: Path) -> None:
    have_nodes(spot, 1)
    _, *script = command(tmp_path, "run")
    driver = start_driver([spot.cluster.python, *script], spot.cluster, print)
    job = Running(driver, open_store(f"{tmp_path}/run"))
    try:
        job.wait_for(lambda: len(job.rows()) > 5)
        chaos = Chaos(spot, job.store, job.driver)
        second = spot.add()
        job.wait_for_group(2, after=0, steps=5)
        on_second = {process.pid for process in spot.processes_of(second)}
        (lost,) = [rank for rank in chaos.workers() if rank is not None and rank.pid in on_second]
        send_signal(lost, signal.SIGKILL)
        spot.kill(second)
        job.wait_for(lambda: job.of(StartEvent)[-1].world_size == 1 and len(job.of(StartEvent)) > 2)
        reached = len(job.rows())
        job.wait_for(lambda: job.sizes()[-5:] == [1] * 5 and len(job.rows()) > reached + 2 * STEPS_OF_EPOCH)
    finally:
        driver.stop()
    steps = read_ledger(job.store).steps.num_rows
    assert [crash.cause for crash in events_in(job.store.url, CrashEvent)]
    assert read_ledger(job.store).replaced.num_rows == 0
    # The script may have evaluated an epoch whose last steps were not in the ledger yet when the driver ended.
    alone = train_alone(command(tmp_path, "alone", f"plan.max_steps={(steps // STEPS_OF_EPOCH + 2) * STEPS_OF_EPOCH}"))
    assert_certified(job.store.url, alone.url, steps)
    run = read_run(job.store)
    assert any("each of 96 samples was used exactly once" in each for each in certify(run, data_of(run)).proved)
    expected = [json.loads(line) for line in (tmp_path / "alone-output" / "results.jsonl").read_text().splitlines()]
    found = [json.loads(line) for line in (tmp_path / "run-output" / "results.jsonl").read_text().splitlines()]
    # An evaluation whose group ends just after it may be there twice.
    epochs = sorted({each["epoch"] for each in found})
    assert epochs == list(range(len(epochs))), "no evaluation is lost"
    assert all(each == expected[each["epoch"]] for each in found)
    assert {step for step, _ in evaluations(job)} >= {STEPS_OF_EPOCH * (epoch + 1) for epoch in epochs[:-1]}
