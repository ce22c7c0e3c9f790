"""Fixtures: a cluster of several nodes, and a run without faults to compare with."""

import pytest
from alone import train_alone
from chaos_kit import SCHEDULED_STEPS, SCRIPT, command


@pytest.fixture(scope="session")
def alone(text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a run without faults, on one worker."""
    runs = str(tmp_path_factory.mktemp("runs"))
    return train_alone(command(text, runs, "alone", f"plan.max_steps={SCHEDULED_STEPS}", script=SCRIPT)).url
