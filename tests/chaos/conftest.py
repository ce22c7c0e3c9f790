"""Fixtures: a cluster of several nodes, and a run without faults to compare with."""

from collections.abc import Iterator

import pytest
from alone import train_alone
from chaos_kit import SCHEDULED_STEPS, SCRIPT, command
from forking.drivers import with_forked_drivers

from undula.testing.nodes import Nodes, nodes


@pytest.fixture(scope="session")
def spot(forking_python: str) -> Iterator[Nodes]:
    """Cluster with two nodes that can be killed, and a head without workers."""
    with nodes(python=forking_python) as running:
        for _ in range(2):
            running.add()
        running.await_all()
        running.cluster = with_forked_drivers(running.cluster)
        yield running


@pytest.fixture(scope="session")
def alone(text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a run without faults, on one worker."""
    runs = str(tmp_path_factory.mktemp("runs"))
    return train_alone(command(text, runs, "alone", f"plan.max_steps={SCHEDULED_STEPS}", script=SCRIPT)).url
