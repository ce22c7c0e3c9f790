"""Ray's own autoscaler, with machines that come when they are asked for and go with a notice of a cloud's metadata server."""

import time
from pathlib import Path

import pytest
from chaos_kit import command

from undula.plan.fleet import ON_DEMAND, SPOT
from undula.report.certificate import certify, data_of
from undula.report.goodput import goodput
from undula.report.summary import RecordedRun, read_run
from undula.storage import open_store
from undula.testing.chaos import Driver, start_driver
from undula.testing.cloud import Cloud, MachineType, cloud

TYPES = {"spot-1": MachineType(SPOT, priority=10), "on-demand-1": MachineType(ON_DEMAND)}
LIMIT_S = 120.0


def wait_for(driver: Driver, step: int, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while driver.step < step:
        assert driver.process.poll() is None, driver.lines[-5:]
        assert time.monotonic() < deadline, driver.lines[-5:]
        time.sleep(0.05)


def wait_for_words(driver: Driver, words: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not any(words in line for line in driver.lines):
        assert driver.process.poll() is None, driver.lines[-5:]
        assert time.monotonic() < deadline, driver.lines[-5:]
        time.sleep(0.05)


def finished(driver: Driver, url: str) -> RecordedRun:
    assert driver.process.wait(LIMIT_S) == 0, driver.lines[-5:]
    run = read_run(open_store(url))
    certificate = certify(run, data_of(run))
    assert certificate.holds, certificate.difference
    return run


def start(there: Cloud, text: str, folder: Path, *overrides: str) -> Driver:
    return start_driver(command(text, str(folder), "spot", "workers.max=2", *overrides), there.cluster, print)


def test_nodes_come_for_a_job_one_goes_with_a_notice_another_comes_and_all_go(text: str, tmp_path: Path) -> None:
    with cloud(TYPES, {SPOT: 3, ON_DEMAND: 1}) as there:
        assert there.machines() == []
        driver = start(there, text, tmp_path, "plan.max_steps=400")
        try:
            wait_for_words(driver, "2 workers")
            wait_for(driver, 5)
            first = there.machines()
            assert [machine.market for machine in first] == [SPOT, SPOT]  # the dearer ones have a lower priority
            there.preempt(first[0].node, notice_s=20)
            wait_for_words(driver, "from 2 to 1")
            wait_for_words(driver, "from 1 to 2")
            run = finished(driver, f"{tmp_path}/spot")
        finally:
            driver.stop()
        said = there.lines_of_watcher(first[0].node)
        there.await_count(lambda machines: not machines, limit_s=60)
    assert sum("Ray drains" in line for line in said) == 1
    assert run.ledger.replaced.num_rows == 0
    kinds = [event.kind for event in run.events]
    assert "notice" in kinds
    assert "crash" not in kinds
    seconds = goodput(run.ledger, run.events)
    held_s = sum(seconds.seconds.values())
    assert min(seconds.seconds.values()) >= -0.01 * held_s
