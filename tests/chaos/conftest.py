"""Fixtures: a cluster of several nodes, and a run without faults to compare with."""

from collections.abc import Iterator

import pytest
from chaos_kit import SCHEDULED_STEPS, SCRIPT, command

from undula.testing.chaos import start_driver
from undula.testing.nodes import Nodes, nodes


@pytest.fixture(scope="session")
def spot() -> Iterator[Nodes]:
    """Cluster with two nodes that can be killed, and a head without workers."""
    with nodes() as running:
        for _ in range(2):
            running.add()
        running.await_all()
        yield running


@pytest.fixture(scope="session")
def alone(spot: Nodes, text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a run without faults, on one worker."""
    runs = str(tmp_path_factory.mktemp("runs"))
    while not spot.nodes:
        spot.add()
    spot.await_all()
    settings = (f"plan.max_steps={SCHEDULED_STEPS}", "workers.max=1")
    driver = start_driver(command(text, runs, "alone", *settings, script=SCRIPT), spot.cluster, print)
    assert driver.process.wait(240) == 0
    return f"{runs}/alone"
