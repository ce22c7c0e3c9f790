"""Tests with Ray's autoscaler and simulated machines, which start on request and end with a notice from a metadata server."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_kit import command, release, wrapped
from forked_drivers import with_forked_drivers

from undula.cluster.prices import load_prices
from undula.plan.fleet import ON_DEMAND, SPOT
from undula.report.data.certificate import certify, data_of
from undula.report.data.cost import cost_of
from undula.report.data.goodput import goodput
from undula.report.data.run_record import RecordedRun, read_run
from undula.state.events import Event, FleetEvent, RefusalEvent, ReleaseEvent, ResizeEvent, StartEvent
from undula.state.ledger import decode_events, read_ledger
from undula.storage import open_store
from undula.testing.chaos import Driver, start_driver
from undula.testing.cloud import Cloud, MachineType, cloud

TYPES = {
    "spot-1": MachineType(SPOT, "g6.xlarge", priority=10),
    "on-demand-1": MachineType(ON_DEMAND, "g6.xlarge"),
}
LIMIT_S = 300.0
PACE_S = 2.0
"""Seconds per step while machines come and go, so that the run does not end before, however long a machine takes."""
Expected = Callable[[Event], bool]

pytestmark = pytest.mark.timeout(900)


def wait_for(driver: Driver, url: str, *expected: Expected) -> None:
    """Wait until the run has recorded events that match, in this order."""
    deadline, store = time.monotonic() + LIMIT_S, open_store(url)
    while True:
        left = list(expected)
        for event in decode_events(read_ledger(store).events):
            if left and left[0](event):
                left.pop(0)
        if not left:
            return
        assert driver.process.poll() is None, (len(left), driver.lines[-5:])
        assert time.monotonic() < deadline, (len(left), driver.lines[-5:])
        time.sleep(0.2)  # limits the polling rate


def starts_with(workers: int) -> Expected:
    return lambda event: isinstance(event, StartEvent) and event.world_size == workers


def resumes(event: Event) -> bool:
    return isinstance(event, StartEvent) and event.origin is not None


def resizes(before: int, after: int) -> Expected:
    return lambda event: isinstance(event, ResizeEvent) and (event.before, event.after) == (before, after)


def asks_for(spot: int, on_demand: int) -> Expected:
    return lambda event: isinstance(event, FleetEvent) and (event.spot, event.on_demand) == (spot, on_demand)


def refuses(node_type: str) -> Expected:
    return lambda event: isinstance(event, RefusalEvent) and event.node_type == node_type


def gives_back(event: Event) -> bool:
    return isinstance(event, ReleaseEvent)


def finished(driver: Driver, url: str, folder: Path) -> RecordedRun:
    release(folder)
    assert driver.process.wait(LIMIT_S) == 0, driver.lines[-5:]
    run = read_run(open_store(url))
    certificate = certify(run, data_of(run))
    assert certificate.holds, certificate.difference
    assert run.ledger.replaced.num_rows == 0
    seconds = goodput(run.ledger, run.events).seconds
    assert min(seconds.values()) >= -0.01 * sum(seconds.values())
    assert "crash" not in [event.kind for event in run.events]
    return run


def start(there: Cloud, text: str, folder: Path, *overrides: str) -> Driver:
    slow = wrapped(folder, pace_s=PACE_S)
    _, *script = command(text, str(folder), "spot", "workers.max=2", *overrides, script=slow)
    return start_driver([there.cluster.python, *script], with_forked_drivers(there.cluster), print)


def markets(there: Cloud) -> list[str]:
    return sorted(machine.market for machine in there.machines())


@pytest.mark.nightly
def test_the_autoscaler_adds_replaces_and_removes_the_nodes_of_a_job(
    forking_python: str, text: str, tmp_path: Path
) -> None:
    with cloud(TYPES, {SPOT: 3, ON_DEMAND: 1}, python=forking_python) as there:
        assert there.machines() == []
        url = f"{tmp_path}/spot"
        driver = start(there, text, tmp_path, "plan.max_steps=300")
        try:
            wait_for(driver, url, starts_with(2))
            first = there.machines()
            assert [machine.market for machine in first] == [SPOT, SPOT]  # on-demand types have a lower priority
            there.preempt(first[0].node, notice_s=20)
            wait_for(driver, url, resizes(2, 1), resizes(1, 2))
            run = finished(driver, url, tmp_path)
        finally:
            driver.stop()
        lines = there.lines_of_watcher(first[0].node)
        there.await_count(lambda machines: not machines, limit_s=60)
    print(*lines, sep="\n")
    assert sum("Ray drains" in line for line in lines) == 1
    cost = cost_of(run, lambda events: load_prices())
    assert cost
    assert cost.unpriced == ()
    assert cost.dollars["useful"] > 0
    assert cost.saved == pytest.approx(1 - 0.4307 / 0.8048)


@pytest.mark.nightly
def test_the_autoscaler_brings_a_gpu_by_default(forking_python: str, text: str, tmp_path: Path) -> None:
    """No GPU exists here, so the worker refuses to train on the node that the autoscaler has started."""
    gpu = MachineType(ON_DEMAND, "g6.xlarge", gpus=1)
    with cloud({"gpu": gpu}, {ON_DEMAND: 1}, python=forking_python) as there:
        driver = start(there, text, tmp_path, "plan.max_steps=4")
        try:
            assert driver.process.wait(LIMIT_S) == 3, driver.lines[-5:]
        finally:
            driver.stop()
        assert any(line.endswith("starting 1 to 2 workers with 1 GPU each ...") for line in driver.lines)
        assert any("Ray has reserved 1 GPU, but torch" in line for line in driver.lines)


@pytest.mark.nightly
def test_an_unavailable_machine_type_is_replaced_by_the_next_one(
    forking_python: str, text: str, tmp_path: Path
) -> None:
    with cloud(TYPES, {SPOT: 1, ON_DEMAND: 1}, python=forking_python) as there:
        url = f"{tmp_path}/spot"
        driver = start(there, text, tmp_path, "plan.max_steps=300")
        try:
            wait_for(driver, url, refuses("spot-1"), starts_with(2))
            assert markets(there) == [ON_DEMAND, SPOT]
            finished(driver, url, tmp_path)
        finally:
            driver.stop()


@pytest.mark.nightly
def test_a_run_behind_its_deadline_trains_on_demand_until_spot_is_available(
    forking_python: str, text: str, tmp_path: Path
) -> None:
    with cloud(TYPES, {SPOT: 0, ON_DEMAND: 2}, python=forking_python) as there:
        fleet = ("workers.fleet.deadline=1h", "workers.fleet.node_start_s=10", "workers.min=2")
        url = f"{tmp_path}/spot"
        driver = start(there, text, tmp_path, "plan.max_steps=300", *fleet)
        try:
            wait_for(driver, url, asks_for(2, 0), asks_for(2, 2), starts_with(2))
            assert markets(there) == [ON_DEMAND, ON_DEMAND]
            there.offer(SPOT, 2)
            wait_for(driver, url, gives_back, resumes)
            there.await_count(lambda machines: [each.market for each in machines] == [SPOT, SPOT], limit_s=60)
            finished(driver, url, tmp_path)
        finally:
            driver.stop()
