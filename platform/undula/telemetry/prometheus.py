"""Metrics of a run for Prometheus, which Ray exports: gauges of the training on rank 0, and counters of the whole run in its hub."""

import threading
from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

from undula.telemetry.counts import HELP, RunCounts
from undula.telemetry.messages import Message

REFRESH_INTERVAL_S = 5.0
"""Seconds between two exports of the gauges. Ray's agent drops a gauge that was not set during two of its report intervals of 10 s."""


_MEANS = ("undula_validation_metric", "Mean of the last validation that the label metric names")
"""Name and description of the gauge of the means that validations have beside the loss."""


class RunGauges:
    """Gauges of a run, which keep their last values until they are closed, however rarely they are set.

    Args:
        name: Name of the run, which is a tag of its metrics.
        texts: Description of each gauge, by its name.
    """

    def __init__(self, name: str, texts: Mapping[str, str]):
        self._gauges = {key: _tagged(Gauge(key, text, tag_keys=("run",)), name) for key, text in texts.items()}
        self._values: dict[str, float] = {}
        self._means_gauge = _tagged(Gauge(*_MEANS, tag_keys=("run", "metric")), name)
        self._means: dict[str, float] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._refresh, name="undula-metrics", daemon=True).start()

    def set(self, values: Mapping[str, float]) -> None:
        """Set gauges to new values."""
        with self._lock:
            self._values.update(values)
            self._export(values)

    def set_means(self, means: Mapping[str, float]) -> None:
        """Set the means of the last validation beside the loss, by name."""
        with self._lock:
            self._means.update(means)
            self._export({})

    def close(self) -> None:
        """Stop exporting. The gauges vanish after a while."""
        with self._lock:
            self._closed.set()

    def _refresh(self) -> None:
        while not self._closed.wait(REFRESH_INTERVAL_S):
            with self._lock:
                self._export(self._values)

    def _export(self, values: Mapping[str, float]) -> None:
        if not self._closed.is_set():
            for key, value in values.items():
                self._gauges[key].set(value)
            for name, mean in self._means.items():
                self._means_gauge.set(mean, {"metric": name})


class RunCounters:
    """Counters of a run, from the messages that its hub receives. Ray exports a counter once it is above zero.

    Args:
        name: Name of the run, which is a tag of its metrics.
    """

    def __init__(self, name: str):
        self._counts = RunCounts()
        self._counters = {key: _tagged(Counter(key, text, tag_keys=("run",)), name) for key, text in HELP.items()}

    def add(self, message: Message) -> None:
        """Count a message."""
        for key, amount in self._counts.added(message).items():
            self._counters[key].inc(amount)


def _tagged(metric: Any, name: str) -> Any:
    metric.set_default_tags({"run": name})
    return metric
