"""Tests of jobs with a worker on the GPU of a Ray cluster: a killed worker, a notice to its node and a lost node change no bit."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from undula.state.events import CrashEvent, StartEvent
from undula.state.ledger import events_of, read_ledger
from undula.state.processes import send_signal
from undula.storage import Store, open_store
from undula.testing.chaos import Chaos, Driver, start_driver
from undula.testing.nodes import Nodes, nodes

TESTS = Path(__file__).parents[1]
LIMIT_S = 200.0
PACE_S = 0.05
ENDLESS = 100_000
JOBS = {
    "a map-style dataset": (
        "chaos/map_job.py",
        f"config.pace_s={PACE_S}",
        "config.num_workers=2",
        "plan.epochs=10000",
        "plan.max_steps={}",
    ),
    "Hugging Face": ("chaos/trainer_job.py", f"config.arguments=--pace {PACE_S} --loaders 2 --steps {{}}"),
    "Lightning": (
        "chaos/lightning_job.py",
        f"config.pace_s={PACE_S}",
        "config.num_workers=2",
        "plan.epochs=10000",
        "plan.max_steps={}",
    ),
}
LIBRARIES = {"Hugging Face": "transformers", "Lightning": "pytorch_lightning"}


@pytest.fixture(scope="module")
def cluster(device_count: int) -> Iterator[Nodes]:
    """Cluster whose nodes all count the GPU of this machine. Only one of them trains at any time."""
    with nodes() as running:
        yield running


@pytest.fixture(scope="module")
def device_count() -> int:
    import torch

    count = torch.cuda.device_count()
    if not count:
        pytest.skip("torch sees no GPU")
    return count


def wait_for(condition: Callable[[], bool], driver: Driver) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert driver.process.poll() is None, driver.lines[-10:]
        assert time.monotonic() < deadline, driver.lines[-10:]
        time.sleep(0.2)  # limits the polling rate


def rows(store: Store) -> int:
    return read_ledger(store).steps.num_rows if store.exists("ledger") else 0


def starts(store: Store) -> list[StartEvent]:
    return events_of(read_ledger(store).events, StartEvent) if store.exists("ledger") else []


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", JOBS)
def test_faults_change_no_bit_on_a_gpu(kind: str, cluster: Nodes, tmp_path: Path) -> None:
    if kind in LIBRARIES:
        pytest.importorskip(LIBRARIES[kind])
    script, *settings = JOBS[kind]
    overrides = [f"runs={tmp_path}", "workers.max=1", *(each.format(ENDLESS) for each in settings)]
    while len(cluster.nodes) < 1:
        cluster.add()
    cluster.await_all()
    command = [cluster.cluster.python, str(TESTS / script), "name=run", *overrides]
    driver = start_driver(command, cluster.cluster, print)
    store = open_store(f"{tmp_path}/run")

    def restarted(times: int) -> None:
        wait_for(lambda: len(starts(store)) > times, driver)
        reached = rows(store)
        wait_for(lambda: rows(store) > reached + 10, driver)

    try:
        restarted(0)
        assert any("1 GPU" in line for line in driver.lines), driver.lines
        (worker,) = [each for each in Chaos(cluster, store, driver).workers() if each is not None]
        send_signal(worker, signal.SIGKILL)
        restarted(1)
        (first,) = cluster.nodes
        cluster.add()
        cluster.await_all()
        cluster.drain(first, deadline_s=60)
        restarted(2)
        cluster.kill(first)
        (second,) = cluster.nodes
        cluster.kill(second)
        cluster.add()
        restarted(3)
    finally:
        driver.stop()
    ledger = read_ledger(store)
    assert len(events_of(ledger.events, CrashEvent)) >= 2
    assert {start.world_size for start in starts(store)} == {1}
    steps = ledger.steps.num_rows
    alone = [f"runs={tmp_path}", "name=alone", *(each.format(steps + 1) for each in settings)]
    subprocess.run(
        [sys.executable, str(TESTS / "alone.py"), str(TESTS / script), *alone],
        check=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
    )
    other = read_ledger(open_store(f"{tmp_path}/alone")).steps
    assert ledger.steps["loss"].to_pylist() == other["loss"].to_pylist()[:steps]
    digests = [digest for digest in ledger.steps["weights_digest"].to_pylist() if digest]
    assert digests
    assert digests == [digest for digest in other["weights_digest"].to_pylist()[:steps] if digest]
