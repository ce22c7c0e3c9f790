"""Metrics of a run for Prometheus, which Ray exports. The run's hub makes them from the messages of its workers and its controller."""

import threading
from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

from undula.state.events import (
    CrashEvent,
    LostEvent,
    NoticeEvent,
    ResizeEvent,
    StartEvent,
    ValidationEvent,
    WaitingEvent,
)
from undula.state.goals import LOSS
from undula.telemetry.messages import Message, Status

REFRESH_INTERVAL_S = 5.0
"""Seconds between two exports of the gauges. Ray's agent drops a gauge that was not set during two of its report intervals of 10 s."""
GAUGES: Mapping[str, str] = {
    "undula_step": "Steps committed",
    "undula_loss": "Training loss of the last committed step",
    "undula_learning_rate": "Learning rate of the last committed step",
    "undula_samples_per_second": "Samples per second, smoothed",
    "undula_world_size": "Ranks that train",
}
"""Description of each gauge of the progress, by its name."""
VALIDATION_LOSS, VALIDATION_METRIC = "undula_validation_loss", "undula_validation_metric"
COMMITTED, REPLAYED, LOST = "undula_committed_steps_total", "undula_replayed_steps_total", "undula_lost_steps_total"
RESTARTS, NOTICES, RESIZES = "undula_restarts_total", "undula_notices_total", "undula_resizes_total"
COUNTERS: Mapping[str, str] = {
    COMMITTED: "Steps committed for the first time",
    REPLAYED: "Steps committed again after they were lost",
    LOST: "Steps that a failure has lost",
    RESTARTS: "Starts of a group after a failure",
    NOTICES: "Notices that a node will be removed",
    RESIZES: "Planned changes of the number of workers",
}
"""Description of each counter, by its name."""


class RunMetrics:
    """Gauges and counters of a run.

    Gauges keep their values, however rarely they are set, until no group trains or the metrics are closed. They then vanish after a while.
    Ray exports a counter once it is above zero.

    Args:
        name: Name of the run, which is a tag of its metrics.
    """

    def __init__(self, name: str):
        self._counts = RunCounts()
        self._counters = {key: _tagged(Counter(key, text, tag_keys=("run",)), name) for key, text in COUNTERS.items()}
        gauges = {**GAUGES, VALIDATION_LOSS: "Loss of the last validation"}
        self._gauges = {key: _tagged(Gauge(key, text, tag_keys=("run",)), name) for key, text in gauges.items()}
        text = "Mean of the last validation that the label metric names"
        self._gauges[VALIDATION_METRIC] = _tagged(Gauge(VALIDATION_METRIC, text, tag_keys=("run", "metric")), name)
        self._values: dict[tuple[str, str], float] = {}
        """Values of gauges, by the gauge and its label `metric`, which is empty if it has none."""
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._refresh, name="undula-metrics", daemon=True).start()

    def add(self, message: Message) -> None:
        """Set the gauges and increase the counters that a message is about."""
        for key, amount in self._counts.added(message).items():
            self._counters[key].inc(amount)
        with self._lock:
            match message:
                case Status(step, _, loss, lr, samples_per_s, world_size, _, means):
                    progress = (step, loss, lr, samples_per_s, world_size)
                    self._values |= {(key, ""): value for key, value in zip(GAUGES, progress, strict=True)}
                    self._values |= _by_gauge(means)
                case ValidationEvent():
                    self._values |= _by_gauge(message.means)
                case CrashEvent() | WaitingEvent():
                    self._values.clear()
                case _:
                    return
            self._export()

    def close(self) -> None:
        """Stop exporting the gauges."""
        self._closed.set()
        with self._lock:
            self._values.clear()

    def _refresh(self) -> None:
        while not self._closed.wait(REFRESH_INTERVAL_S):
            with self._lock:
                self._export()

    def _export(self) -> None:
        for (key, metric), value in self._values.items():
            self._gauges[key].set(value, {"metric": metric} if metric else None)


class RunCounts:
    """Counter of the steps and changes of a run. Steps before the first start are those of an earlier driver and are not counted."""

    def __init__(self) -> None:
        self._at: int | None = None
        """Number of committed steps, or None before the first start."""
        self._highest = 0
        """Number of steps that were committed at least once."""
        self._has_failed = False

    def added(self, message: Message) -> dict[str, int]:
        """Return the amounts by which a message increases the counts. Counts that stay the same are absent."""
        counts: dict[str, int] = {}
        match message:
            case Status(step=step):
                counts = self._advance(step)
            case StartEvent(step=step):
                counts = self._start(step)
            case LostEvent(steps=steps, step=step):
                self._highest = max(self._highest, step + steps)
                counts = {LOST: steps}
            case CrashEvent():
                self._has_failed = True
            case NoticeEvent():
                counts = {NOTICES: 1}
            case ResizeEvent():
                counts = {RESIZES: 1}
        return {name: amount for name, amount in counts.items() if amount > 0}

    def _advance(self, step: int) -> dict[str, int]:
        """Count the steps up to `step`. A late status of a group that was replaced counts nothing."""
        if self._at is None or step <= self._at:
            return {}
        replayed = max(min(step, self._highest) - self._at, 0)
        counts = {COMMITTED: step - self._at - replayed, REPLAYED: replayed}
        self._at, self._highest = step, max(step, self._highest)
        return counts

    def _start(self, step: int) -> dict[str, int]:
        """Count the steps that a former group committed after its last status, and the restart."""
        counts = self._advance(step)
        if self._at is None:
            self._highest = max(self._highest, step)
        self._at = step
        restarts, self._has_failed = int(self._has_failed), False
        return {**counts, RESTARTS: restarts}


def _by_gauge(means: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Return the means of a validation by their gauge and its label `metric`."""
    return {(VALIDATION_LOSS, "") if name == LOSS else (VALIDATION_METRIC, name): mean for name, mean in means.items()}


def _tagged(metric: Any, name: str) -> Any:
    metric.set_default_tags({"run": name})
    return metric
