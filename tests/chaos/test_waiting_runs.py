"""Test of two jobs that wait for workers on one cluster, each of which could train if the other one did not hold any."""

from pathlib import Path

import pytest
from chaos_kit import command, events_in, have_nodes
from waiting import wait_until

from undula.state.events import GiveWayEvent, StartEvent, WaitingEvent
from undula.testing.chaos import Driver, start_driver
from undula.testing.nodes import Nodes

LIMIT_S = 240.0

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def test_a_job_that_cannot_train_gives_its_workers_to_one_that_can(spot: Nodes, text: str, tmp_path: Path) -> None:
    have_nodes(spot, 2)

    def start(name: str, workers: int) -> Driver:
        sizes = ("plan.max_steps=3", f"workers.min={workers}", f"workers.max={workers}", "data.validation=null")
        folder = tmp_path / name
        folder.mkdir()
        job = command(text, str(folder), name, *sizes)
        return start_driver([spot.cluster.python, *job[1:]], spot.cluster, print)

    large = start("large", 3)
    try:
        wait_until(lambda: any("(2 ready" in line for line in large.lines), LIMIT_S)
        small = start("small", 2)
        try:
            assert small.process.wait(LIMIT_S) == 0
        finally:
            small.stop()
        assert any(event.rivals == ("large",) for event in events_in(f"{tmp_path}/small/small", WaitingEvent))
        (gave,) = events_in(f"{tmp_path}/large/large", GiveWayEvent)
        assert (gave.workers, gave.rivals) == (2, ("small",))
        assert events_in(f"{tmp_path}/large/large", StartEvent) == []
        spot.add()
        assert large.process.wait(LIMIT_S) == 0
    finally:
        large.stop()
