"""Where rank 0 tells of each committed step and event: ledger, TensorBoard, Prometheus through Ray, and the driver's live view."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress

from ray.util.metrics import Gauge

from undula.errors import StorageError
from undula.state.events import Event, LossEvent, ValidationEvent
from undula.state.ledger import LedgerWriter
from undula.state.records import StepRow
from undula.storage import Store
from undula.telemetry.messages import Publisher, Status

STATUS_INTERVAL_S = 0.5
_GAUGES = {
    "undula_step": "Steps committed",
    "undula_loss": "Training loss of the last committed step",
    "undula_learning_rate": "Learning rate of the last committed step",
    "undula_samples_per_second": "Samples per second, smoothed",
    "undula_world_size": "Ranks that train",
    "undula_validation_loss": "Loss of the last validation",
}


class Telemetry:
    """All that is told of a run, by its rank 0."""

    def __init__(self, store: Store, name: str, attempt: int, start: int, total_steps: int, publish: Publisher):
        from undula.telemetry.tensorboard import TensorBoardWriter  # whose library imports boto3; only rank 0 needs it

        self._total_steps = total_steps
        self._publish = publish
        self._ledger = LedgerWriter(store, attempt)
        self._board = TensorBoardWriter(store, attempt, start)
        self._gauges = {key: Gauge(key, text, tag_keys=("run",)) for key, text in _GAUGES.items()}
        for gauge in self._gauges.values():
            gauge.set_default_tags({"run": name})
        self._told_at = 0.0
        self._seconds_per_step = 0.0
        self._samples_per_s = 0.0
        self._losses: list[tuple[float, int]] = []

    @property
    def stored_steps(self) -> int:
        """Steps whose rows have reached storage."""
        return self._ledger.stored_steps

    def repeat(self, rows: Sequence[StepRow]) -> None:
        """Rows of a former attempt that may not have reached storage, as its rank 0 may be gone."""
        for row in rows:
            self._ledger.step(row)

    def step(self, row: StepRow) -> None:
        self._ledger.step(row)
        self._losses.append((row.loss, row.step_samples))
        seconds = row.data_s + row.compute_s + row.communication_s + row.other_s
        smooth = 0.9 if self._seconds_per_step else 0.0
        self._seconds_per_step = smooth * self._seconds_per_step + (1 - smooth) * seconds
        self._samples_per_s = smooth * self._samples_per_s + (1 - smooth) * row.step_samples / max(seconds, 1e-9)
        values = {"loss/train": row.loss, "lr": row.lr, "samples_per_s": row.step_samples / max(seconds, 1e-9)}
        values |= {f"logged/{name}": value for name, value in json.loads(row.logged).items()}
        self._board.add(row.done, values)
        now = time.monotonic()
        if now - self._told_at >= STATUS_INTERVAL_S or row.done == self._total_steps:
            self._told_at = now
            self._tell(row)

    def event(self, event: Event) -> None:
        self._ledger.event(event)
        self._publish(event)
        if isinstance(event, ValidationEvent):
            self._board.add(event.step, {"loss/validation": event.loss})
            self._gauges["undula_validation_loss"].set(event.loss)

    def mean_loss(self, done: int) -> None:
        """Tell the mean training loss of a sample since this was last called."""
        if not self._losses:  # another group has done the steps
            return
        samples = sum(count for _, count in self._losses)
        loss = sum(loss * count for loss, count in self._losses) / samples
        self.event(LossEvent(loss, samples, step=done))
        self._losses = []

    def flush(self) -> None:
        """Bring everything told so far to storage. Called from the checkpoint's thread too."""
        self._ledger.flush()
        self._board.flush()

    def close(self) -> None:
        self._ledger.close()
        with suppress(StorageError):  # what a checkpoint covers is there since its commit
            self.flush()

    def _tell(self, row: StepRow) -> None:
        left = (self._total_steps - row.done) / row.merged_steps * self._seconds_per_step
        self._publish(Status(row.done, self._total_steps, row.loss, row.lr, self._samples_per_s, row.world_size, left))
        told = (row.done, row.loss, row.lr, self._samples_per_s, row.world_size)
        for gauge, value in zip(list(self._gauges.values()), told, strict=False):
            gauge.set(value)
