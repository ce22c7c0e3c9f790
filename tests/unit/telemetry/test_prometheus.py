"""Tests of the metrics for Prometheus: gauges stay while a group trains, and counters count each step and each change once."""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from undula.state import events
from undula.telemetry import prometheus
from undula.telemetry.messages import Message, Status
from undula.telemetry.prometheus import COMMITTED, COUNTERS, GAUGES, LOST, NOTICES, REPLAYED, RESIZES, RESTARTS


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
            assert self.was_set.wait_for(lambda: self.values[-len(values) :] == list(values), timeout=60)


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[prometheus.RunMetrics]:
    monkeypatch.setattr(prometheus, "Gauge", RecordedGauge)
    monkeypatch.setattr(prometheus, "REFRESH_INTERVAL_S", 0.005)
    exported = prometheus.RunMetrics("run")
    yield exported
    exported.close()


def at(step: int, **means: float) -> Status:
    return Status(step, 100, 1.0, 0.1, 10.0, 2, 60.0, means)


def start(step: int) -> events.StartEvent:
    return events.StartEvent(2, 1, step=step)


@pytest.mark.parametrize(
    "end", [events.CrashEvent("hang", rank=1), events.WaitingEvent(0, needed=1), None], ids=["crash", "wait", "close"]
)
def test_gauges_are_set_again_until_no_group_trains(metrics: prometheus.RunMetrics, end: Message | None) -> None:
    gauge = RecordedGauge.made["undula_step"]
    metrics.add(at(7))
    gauge.await_values(7, 7, 7)
    assert gauge.tags == {"run": "run"}
    assert RecordedGauge.made[prometheus.VALIDATION_LOSS].values == [], "a gauge without a value is not exported"
    metrics.add(end) if end else metrics.close()
    count = len(gauge.values)
    threading.Event().wait(0.05)  # ten exports
    assert len(gauge.values) == count


@pytest.mark.parametrize(
    "message", [at(9, loss=1.5, accuracy=0.5), events.ValidationEvent(1.5, 9, {"accuracy": 0.5}, step=9)]
)
def test_means_of_a_validation_are_exported_with_it_and_those_of_a_former_attempt_with_the_first_status(
    metrics: prometheus.RunMetrics, message: Message
) -> None:
    metrics.add(message)
    RecordedGauge.made[prometheus.VALIDATION_LOSS].await_values(1.5, 1.5)
    accuracy = RecordedGauge.made[prometheus.VALIDATION_METRIC]
    accuracy.await_values(0.5, 0.5, 0.5)
    assert (accuracy.tags, accuracy.own_tags) == ({"run": "run"}, {"metric": "accuracy"})


LAST_LOST = (start(0), at(10), events.CrashEvent("failure", "a node was lost"))
RESIZED = (
    start(0),
    at(8),
    events.NoticeEvent("node", (1,)),
    events.ResizeEvent(2, 1, "a node has a notice"),
    start(10),
    at(12),
)
REPEATED: dict[str, Any] = {COMMITTED: 20, LOST: 4, REPLAYED: 4, RESTARTS: 1}


@pytest.mark.parametrize(
    ("messages", "counts"),
    [
        pytest.param((start(0), at(3), at(3), at(10)), {COMMITTED: 10}, id="each step once"),
        pytest.param(RESIZED, {COMMITTED: 12, NOTICES: 1, RESIZES: 1}, id="steps after the last status of a group"),
        pytest.param((*LAST_LOST, events.LostEvent(4, step=6), start(6), at(8), at(20)), REPEATED, id="lost steps"),
        pytest.param(
            (start(0), at(9), LAST_LOST[2], start(6), events.LostEvent(4, step=6), at(8), at(20)),
            REPEATED | {COMMITTED: 19},
            id="the status of the last lost step had not arrived",
        ),
        pytest.param((at(5), start(50), at(60)), {COMMITTED: 10}, id="steps of an earlier driver do not count"),
        pytest.param(
            (start(0), at(10), events.CrashEvent("hang", rank=1), start(10), at(7)),
            {COMMITTED: 10, RESTARTS: 1},
            id="a late status of a replaced group does not count",
        ),
    ],
)
def test_steps_and_changes_are_counted(messages: tuple[Message, ...], counts: dict[str, int]) -> None:
    counter, total = prometheus.RunCounts(), Counter[str]()
    for message in messages:
        total.update(counter.added(message))
    assert total == counts


def test_names_follow_the_conventions_of_prometheus() -> None:
    assert all(name.startswith("undula_") and name.endswith("_total") for name in COUNTERS)
    assert all(name.startswith("undula_") and not name.endswith("_total") for name in GAUGES)
