"""Tests of the metrics for Prometheus: gauges stay, and counters count each step and each change once."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ledger_rows import step_row

from undula.state.events import CrashEvent, EndEvent, LostEvent, NoticeEvent, ResizeEvent, StartEvent, ValidationEvent
from undula.storage import Store
from undula.telemetry import prometheus
from undula.telemetry.counts import COMMITTED, HELP, LOST, NOTICES, REPLAYED, RESIZES, RESTARTS, RunCounts
from undula.telemetry.messages import Message, Status
from undula.telemetry.prometheus import RunGauges
from undula.telemetry.reporter import Telemetry


class RecordedGauge:
    """Gauge that keeps the values that it was set to, in place of Ray's, which reports to the agent of a node."""

    made: ClassVar[dict[str, "RecordedGauge"]] = {}

    def __init__(self, name: str, text: str, tag_keys: tuple[str, ...]):
        self.values: list[float] = []
        self.was_set = threading.Condition()
        self.made[name] = self

    def set_default_tags(self, tags: dict[str, str]) -> None:
        self.tags = tags

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        with self.was_set:
            self.values.append(value)
            self.own_tags = tags
            self.was_set.notify_all()

    def await_values(self, *values: float) -> None:
        with self.was_set:
            assert self.was_set.wait_for(lambda: self.values[: len(values)] == list(values), timeout=60)


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunGauges]:
    monkeypatch.setattr(prometheus, "Gauge", RecordedGauge)
    monkeypatch.setattr(prometheus, "REFRESH_INTERVAL_S", 0.005)
    found = RunGauges("run", {"loss": "Loss", "validation": "Validation loss"})
    yield found
    found.close()


def test_a_gauge_is_set_again_until_it_is_closed(gauges: RunGauges) -> None:
    gauges.set({"validation": 1.5})
    RecordedGauge.made["validation"].await_values(1.5, 1.5, 1.5)
    assert RecordedGauge.made["loss"].values == [], "a gauge without a value is not exported"
    gauges.set({"loss": 2.0})
    RecordedGauge.made["loss"].await_values(2.0, 2.0)
    assert RecordedGauge.made["loss"].tags == {"run": "run"}
    gauges.close()
    count = len(RecordedGauge.made["loss"].values)
    gauges.set({"loss": 3.0})
    assert len(RecordedGauge.made["loss"].values) == count


def test_other_means_of_a_validation_are_set_again_with_their_name(gauges: RunGauges) -> None:
    gauges.set_means({"accuracy": 0.5})
    gauge = RecordedGauge.made["undula_validation_metric"]
    gauge.await_values(0.5, 0.5, 0.5)
    assert (gauge.tags, gauge.own_tags) == ({"run": "run"}, {"metric": "accuracy"})


@pytest.fixture
def telemetry(gauges: RunGauges, tmp_path: Path) -> Iterator[tuple[Telemetry, list[Message]]]:
    messages: list[Message] = []
    found = Telemetry(Store(str(tmp_path)), "run", attempt=2, start=0, total_steps=100, publish=messages.append)
    yield found, messages
    found.close()


def test_the_means_of_a_former_attempt_are_exported_before_the_first_validation(
    telemetry: tuple[Telemetry, list[Message]],
) -> None:
    telemetry[0].export_means({"loss": 1.5, "accuracy": 0.5})
    RecordedGauge.made["undula_validation_loss"].await_values(1.5, 1.5)
    RecordedGauge.made["undula_validation_metric"].await_values(0.5, 0.5)


def test_the_last_step_of_a_run_that_stops_early_is_counted(telemetry: tuple[Telemetry, list[Message]]) -> None:
    reporter, messages = telemetry
    for step in range(3):  # within the shortest time between two statuses
        reporter.step(step_row(2, step))
    reporter.event(EndEvent("loss has not improved", step=3))
    assert [each.step for each in messages if isinstance(each, Status)] == [1, 3]
    assert counted(start(0), *messages) == {COMMITTED: 3}


def counted(*messages: Message) -> dict[str, int]:
    counts, found = RunCounts(), Counter[str]()
    for message in messages:
        found.update(counts.added(message))
    return dict(found)


def at(step: int) -> Status:
    return Status(step, 100, 1.0, 0.1, 10.0, 2, 60.0)


def start(step: int) -> StartEvent:
    return StartEvent(2, 1, step=step)


def test_each_step_is_committed_once() -> None:
    assert counted(start(0), at(3), at(3), at(10), ValidationEvent(1.0, 9, step=10)) == {COMMITTED: 10}


def test_steps_after_the_last_status_of_a_group_are_counted_at_the_next_start() -> None:
    resize = ResizeEvent(2, 1, "a node has a notice")
    messages: tuple[Any, ...] = (start(0), at(8), NoticeEvent("node", (1,)), resize, start(10), at(12))
    assert counted(*messages) == {COMMITTED: 12, NOTICES: 1, RESIZES: 1}


def test_lost_steps_are_replayed_and_not_committed_again() -> None:
    crash = CrashEvent("failure", "a node was lost")
    known = {COMMITTED: 20, LOST: 4, REPLAYED: 4, RESTARTS: 1}
    assert counted(start(0), at(10), crash, LostEvent(4, step=6), start(6), at(8), at(20)) == known
    assert counted(start(0), at(9), crash, start(6), LostEvent(4, step=6), at(8), at(20)) == known | {
        COMMITTED: 20 - 1
    }, "the status of the last lost step had not arrived"


def test_steps_of_an_earlier_driver_are_not_counted() -> None:
    assert counted(at(5), start(50), at(60)) == {COMMITTED: 10}


def test_a_late_status_of_a_group_that_was_replaced_counts_nothing() -> None:
    assert counted(start(0), at(10), CrashEvent("hang", rank=1), start(10), at(7)) == {COMMITTED: 10, RESTARTS: 1}


def test_names_follow_the_conventions_of_prometheus() -> None:
    assert all(name.startswith("undula_") and name.endswith("_total") for name in HELP)
