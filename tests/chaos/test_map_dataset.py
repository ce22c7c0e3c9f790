"""Test of a run on a map-style dataset under faults, with and without loader processes: the bits of a run left alone, and no orphans.

The same holds for a LightningModule, whose hooks have state that changes the loss.
"""

import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from alone import train_alone
from chaos_kit import PACE_S, Running, assert_certified, events_in, have_nodes
from small_text import ENDLESS

from undula.report.data.certificate import certify, data_of
from undula.report.data.run_record import read_run
from undula.state.events import CrashEvent, StartEvent
from undula.state.ledger import read_ledger
from undula.state.processes import descendants, is_alive, send_signal
from undula.storage import open_store
from undula.testing.chaos import Chaos, start_driver
from undula.testing.nodes import Nodes

pytestmark = pytest.mark.timeout(400)
STEPS_OF_EPOCH = 21


def command(job: str, folder: Path, name: str, *overrides: str) -> list[str]:
    """Return the command of the job, whose script is in a folder of its own because the modules beside it go with it."""
    script = folder / "job" / f"{job}.py"
    if not script.exists():
        script.parent.mkdir()
        for name_of_file in (script.name, f"{job}.yaml"):
            shutil.copy(Path(__file__).parent / name_of_file, script.parent)
    return [sys.executable, str(script), f"name={name}", f"runs={folder}", *overrides]


@contextmanager
def running(spot: Nodes, script: list[str]) -> Iterator[Running]:
    """Start the job on a cluster with one node, wait for its first steps, and stop it after the block."""
    have_nodes(spot, 1)
    driver = start_driver([spot.cluster.python, *script[1:]], spot.cluster, print)
    (folder,) = (each.removeprefix("runs=") for each in script if each.startswith("runs="))
    job = Running(driver, open_store(f"{folder}/run"))
    try:
        job.wait_for(lambda: len(job.rows()) > 5)
        yield job
    finally:
        driver.stop()


def loaders_of(rank: psutil.Process) -> list[psutil.Process]:
    """Return the loader processes of a rank, which are the children of its fork server."""
    servers = [each for each in descendants(rank) if "multiprocessing.forkserver" in " ".join(each.cmdline())]
    return [each for server in servers for each in server.children()]


@pytest.mark.parametrize(
    ("name", "num_workers", "pace_s"),
    [
        pytest.param("map_job", 0, PACE_S, marks=pytest.mark.nightly),
        ("map_job", 1, PACE_S),
        pytest.param("map_job", 2, PACE_S, marks=pytest.mark.nightly),
        # Its pace is that of a micro-batch, of which a step has eight.
        pytest.param("lightning_job", 2, PACE_S / 8, marks=pytest.mark.nightly),
    ],
)
def test_faults_change_no_bit_and_leave_no_loader_process(
    spot: Nodes, tmp_path: Path, name: str, num_workers: int, pace_s: float
) -> None:
    overrides = (*ENDLESS, f"config.pace_s={pace_s}", f"config.num_workers={num_workers}")
    with running(spot, command(name, tmp_path, "run", *overrides)) as job:
        chaos = Chaos(spot, job.store, job.driver)
        second = spot.add()
        job.wait_for_group(2, after=0, steps=5)
        ranks = [rank for rank in chaos.workers() if rank is not None]
        assert len(ranks) == 2
        if num_workers:
            send_signal(loaders_of(ranks[0])[0], signal.SIGKILL)
            reached = len(job.rows())
            job.wait_for(lambda: len(job.rows()) > reached + 10)
            assert [start.world_size for start in job.of(StartEvent)] == [1, 2], "the group goes on"
        on_second = {process.pid for process in spot.processes_of(second)}
        (lost,) = [rank for rank in ranks if rank.pid in on_second]
        with_it, loaders = descendants(lost), loaders_of(lost)
        assert len(loaders) >= num_workers
        send_signal(lost, signal.SIGKILL)
        killed = time.monotonic()
        for kind, processes in (("loader", loaders), ("other", with_it)):
            job.wait_for(lambda of=processes: not any(map(is_alive, of)), limit_s=20)  # type: ignore[misc]
            print(f"the {kind} processes of a killed rank ended after {time.monotonic() - killed:.1f} s")
        spot.kill(second)
        attempt = job.of(StartEvent)[-1].attempt
        job.wait_for(lambda: len(job.rows()) > 2 * STEPS_OF_EPOCH)
        job.wait_for(lambda: any(start.attempt > attempt or start.world_size == 1 for start in job.of(StartEvent)[2:]))
        job.wait_for(lambda: job.sizes()[-5:] == [1] * 5)
    steps = read_ledger(job.store).steps.num_rows
    assert [crash.cause for crash in events_in(job.store.url, CrashEvent)]
    assert read_ledger(job.store).replaced.num_rows == 0
    alone = train_alone(command(name, tmp_path, "alone", *ENDLESS, f"plan.max_steps={steps + 1}"))
    assert_certified(job.store.url, alone.url, steps)
    run = read_run(job.store)
    assert any("each of 500 samples was used exactly once" in each for each in certify(run, data_of(run)).proved)
