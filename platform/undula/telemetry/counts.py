"""Counts of what has happened to a run since its driver started, from the messages of its workers and its controller. Pure."""

from collections.abc import Mapping

from undula.state.events import CrashEvent, LostEvent, NoticeEvent, ResizeEvent, StartEvent
from undula.telemetry.messages import Message, Status

COMMITTED, REPLAYED, LOST = "undula_committed_steps_total", "undula_replayed_steps_total", "undula_lost_steps_total"
RESTARTS, NOTICES, RESIZES = "undula_restarts_total", "undula_notices_total", "undula_resizes_total"
HELP: Mapping[str, str] = {
    COMMITTED: "Steps committed for the first time",
    REPLAYED: "Steps committed again after they were lost",
    LOST: "Steps that a failure has lost",
    RESTARTS: "Starts of a group after a failure",
    NOTICES: "Notices that a node will be removed",
    RESIZES: "Planned changes of the number of workers",
}
"""Description of each counter, by its name."""


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
        match message:
            case Status(step=step):
                found = self._advance(step)
            case StartEvent(step=step):
                found = self._start(step)
            case LostEvent(steps=steps, step=step):
                self._highest = max(self._highest, step + steps)
                found = {LOST: steps}
            case CrashEvent():
                self._has_failed = True
                found = {}
            case NoticeEvent():
                found = {NOTICES: 1}
            case ResizeEvent():
                found = {RESIZES: 1}
            case _:
                found = {}
        return {name: amount for name, amount in found.items() if amount > 0}

    def _advance(self, step: int) -> dict[str, int]:
        """Count the steps up to `step`. A late status of a group that was replaced counts nothing."""
        if self._at is None or step <= self._at:
            return {}
        replayed = max(min(step, self._highest) - self._at, 0)
        found = {COMMITTED: step - self._at - replayed, REPLAYED: replayed}
        self._at, self._highest = step, max(step, self._highest)
        return found

    def _start(self, step: int) -> dict[str, int]:
        """Count the steps that a former group committed after its last status, and the restart."""
        found = self._advance(step)
        if self._at is None:
            self._highest = max(self._highest, step)
        self._at = step
        restarts, self._has_failed = int(self._has_failed), False
        return {**found, RESTARTS: restarts}
