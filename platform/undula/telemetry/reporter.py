"""Reports of rank 0 about steps and events: to the ledger, and to the hub of the run."""

import time
from collections.abc import Mapping, Sequence

from undula.state.events import EndEvent, Event, LossEvent, ValidationEvent
from undula.state.ledger import LedgerWriter
from undula.state.records import StepRow
from undula.storage import Store
from undula.telemetry.messages import Publisher, Status

STATUS_INTERVAL_S = 0.5
"""Minimum time in seconds between two status messages to the driver."""


class Telemetry(LedgerWriter):
    """Writer of rank 0's part of the ledger, which also sends the progress of the run to the driver.

    Args:
        store: Run directory.
        attempt: Number of the attempt.
        total_steps: Number of steps in the plan.
        publish: Callback that receives messages for the driver.
    """

    def __init__(self, store: Store, attempt: int, total_steps: int, publish: Publisher):
        super().__init__(store, attempt)
        self._total_steps = total_steps
        self._publish = publish
        self._means: Mapping[str, float] = {}
        """Means of the newest validation by name."""
        self._status_at = 0.0
        self._seconds_per_step = 0.0
        self._samples_per_s = 0.0
        self._losses: list[tuple[float, int]] = []
        self._unsent: StepRow | None = None
        """Newest step if the driver has no status of it yet."""

    def repeat(self, rows: Sequence[StepRow]) -> None:
        """Write rows of a former attempt again, because its rank 0 may be lost before they reached storage."""
        for row in rows:
            super().step(row)

    def step(self, row: StepRow) -> None:
        """Report a committed step.

        Raises:
            SupersededError: A newer attempt of the run exists.
        """
        super().step(row)
        self._losses.append((row.loss, row.step_samples))
        smooth = 0.9 if self._seconds_per_step else 0.0
        self._seconds_per_step = smooth * self._seconds_per_step + (1 - smooth) * row.seconds
        self._samples_per_s = smooth * self._samples_per_s + (1 - smooth) * row.step_samples / max(row.seconds, 1e-9)
        self._unsent = row
        if time.monotonic() - self._status_at >= STATUS_INTERVAL_S or row.done == self._total_steps:
            self._send_status(row)

    def event(self, event: Event) -> None:
        """Report an event."""
        if isinstance(event, EndEvent) and self._unsent:  # the run may end before its last planned step
            self._send_status(self._unsent)
        if isinstance(event, ValidationEvent):
            self.export_means(event.means)
        super().event(event)
        self._publish(event)

    def export_means(self, means: Mapping[str, float]) -> None:
        """Export the means of the newest validation by name with each status; it may be one of a former attempt."""
        self._means = means

    def mean_loss(self, done: int) -> None:
        """Report the mean training loss per sample since the last call."""
        if not self._losses:  # another group committed the steps since the last report
            return
        samples = sum(count for _, count in self._losses)
        loss = sum(loss * count for loss, count in self._losses) / samples
        self.event(LossEvent(loss, samples, step=done))
        self._losses = []

    def _send_status(self, row: StepRow) -> None:
        self._status_at, self._unsent = time.monotonic(), None
        left = (self._total_steps - row.done) / row.merged_steps * self._seconds_per_step
        speed, means = self._samples_per_s, self._means
        self._publish(Status(row.done, self._total_steps, row.loss, row.lr, speed, row.world_size, left, means))
