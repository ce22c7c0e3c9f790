"""Tests of the reports of rank 0: what they write, and what the driver gets."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_rows import step_row

from undula.state.events import EndEvent, ValidationEvent
from undula.storage import Store
from undula.telemetry.messages import Message, Status
from undula.telemetry.reporter import Telemetry


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[tuple[Telemetry, list[Message]]]:
    messages: list[Message] = []
    telemetry = Telemetry(Store(str(tmp_path)), attempt=2, total_steps=100, publish=messages.append)
    yield telemetry, messages
    telemetry.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ledger"], "rank 0 writes nothing else"


def test_the_last_step_of_a_run_that_stops_early_has_a_status(reports: tuple[Telemetry, list[Message]]) -> None:
    telemetry, messages = reports
    for step in range(3):  # within the shortest time between two statuses
        telemetry.step(step_row(2, step))
    telemetry.event(EndEvent("loss has not improved", step=3))
    assert [message.step for message in messages if isinstance(message, Status)] == [1, 3]


def test_a_status_has_the_means_of_the_newest_validation_which_may_be_one_of_a_former_attempt(
    reports: tuple[Telemetry, list[Message]],
) -> None:
    telemetry, messages = reports
    telemetry.export_means({"loss": 2.0})
    telemetry.step(step_row(2, 0))
    telemetry.event(ValidationEvent(1.5, 9, {"accuracy": 0.5}, step=1))
    telemetry.step(step_row(2, 99))
    first, second = (message.means for message in messages if isinstance(message, Status))
    assert (first, second) == ({"loss": 2.0}, {"loss": 1.5, "accuracy": 0.5})
