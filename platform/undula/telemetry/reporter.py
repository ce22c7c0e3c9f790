"""Reports of rank 0 about steps and events: to the ledger, TensorBoard, Prometheus (through Ray) and the live view of the driver."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from undula.errors import StorageError
from undula.state.events import EndEvent, Event, LogEvent, LossEvent, ValidationEvent
from undula.state.goals import LOSS
from undula.state.ledger import LedgerWriter
from undula.state.records import StepRow
from undula.storage import Store
from undula.telemetry.messages import Publisher, Status
from undula.telemetry.prometheus import RunGauges

STATUS_INTERVAL_S = 0.5
"""Minimum time in seconds between two status messages to the driver."""
_GAUGES = {
    "undula_step": "Steps committed",
    "undula_loss": "Training loss of the last committed step",
    "undula_learning_rate": "Learning rate of the last committed step",
    "undula_samples_per_second": "Samples per second, smoothed",
    "undula_world_size": "Ranks that train",
    "undula_validation_loss": "Loss of the last validation",
}


class Telemetry:
    """Reports the progress of a run from its rank 0.

    Args:
        store: Run directory.
        name: Name of the run, which is a tag of its metrics.
        attempt: Number of the attempt.
        start: Step at which the attempt starts.
        total_steps: Number of steps in the plan.
        publish: Callback that receives messages for the driver.
    """

    def __init__(self, store: Store, name: str, attempt: int, start: int, total_steps: int, publish: Publisher):
        from undula.telemetry.tensorboard import (
            TensorBoardWriter,
        )  # only rank 0 needs tensorboardX, which imports boto3

        self._total_steps = total_steps
        self._publish = publish
        self._ledger = LedgerWriter(store, attempt)
        self._tensorboard = TensorBoardWriter(store, attempt, start)
        self._gauges = RunGauges(name, _GAUGES)
        self._status_at = 0.0
        self._seconds_per_step = 0.0
        self._samples_per_s = 0.0
        self._losses: list[tuple[float, int]] = []
        self._unsent: StepRow | None = None
        """Newest step if the driver has no status of it yet."""

    @property
    def stored_steps(self) -> int:
        """Number of steps whose rows have reached storage."""
        return self._ledger.stored_steps

    def repeat(self, rows: Sequence[StepRow]) -> None:
        """Write rows of a former attempt again, because its rank 0 may be lost before they reached storage."""
        for row in rows:
            self._ledger.step(row)

    def step(self, row: StepRow) -> None:
        """Report a committed step."""
        self._ledger.step(row)
        self._losses.append((row.loss, row.step_samples))
        seconds = row.seconds
        smooth = 0.9 if self._seconds_per_step else 0.0
        self._seconds_per_step = smooth * self._seconds_per_step + (1 - smooth) * seconds
        self._samples_per_s = smooth * self._samples_per_s + (1 - smooth) * row.step_samples / max(seconds, 1e-9)
        values = {"loss/train": row.loss, "lr": row.lr, "samples_per_s": row.step_samples / max(seconds, 1e-9)}
        values |= {f"logged/{name}": value for name, value in json.loads(row.logged).items()}
        self._tensorboard.add(row.done, values)
        self._unsent = row
        if time.monotonic() - self._status_at >= STATUS_INTERVAL_S or row.done == self._total_steps:
            self._send_status(row)

    def event(self, event: Event) -> None:
        """Report an event."""
        if isinstance(event, EndEvent) and self._unsent:  # the run may end before its last planned step
            self._send_status(self._unsent)
        self._ledger.event(event)
        self._publish(event)
        if isinstance(event, ValidationEvent):
            self._tensorboard.add(event.step, {f"{name}/validation": value for name, value in event.means.items()})
            self.export_means(event.means)
        elif isinstance(event, LogEvent):
            self._tensorboard.add(event.step, {f"logged/{name}": value for name, value in event.values.items()})

    def export_means(self, means: Mapping[str, float]) -> None:
        """Export the means of the newest validation by name; it may be one of a former attempt."""
        if LOSS in means:
            self._gauges.set({"undula_validation_loss": means[LOSS]})
        self._gauges.set_means({name: mean for name, mean in means.items() if name != LOSS})

    def mean_loss(self, done: int) -> None:
        """Report the mean training loss per sample since the last call."""
        if not self._losses:  # another group committed the steps since the last report
            return
        samples = sum(count for _, count in self._losses)
        loss = sum(loss * count for loss, count in self._losses) / samples
        self.event(LossEvent(loss, samples, step=done))
        self._losses = []

    def flush(self) -> None:
        """Write all previous reports to storage. This is thread-safe, because the thread that saves checkpoints calls it too.

        Raises:
            StorageError: The storage cannot be written to.
        """
        self._ledger.flush()
        self._tensorboard.flush()

    def close(self) -> None:
        """Write the remaining reports to storage, ignoring errors of the storage, and stop exporting metrics."""
        self._gauges.close()
        self._ledger.close()
        with suppress(StorageError):  # everything that a checkpoint covers was stored before its commit
            self.flush()

    def _send_status(self, row: StepRow) -> None:
        self._status_at, self._unsent = time.monotonic(), None
        left = (self._total_steps - row.done) / row.merged_steps * self._seconds_per_step
        self._publish(Status(row.done, self._total_steps, row.loss, row.lr, self._samples_per_s, row.world_size, left))
        values = (row.done, row.loss, row.lr, self._samples_per_s, row.world_size)
        self._gauges.set(dict(zip(_GAUGES, values, strict=False)))
