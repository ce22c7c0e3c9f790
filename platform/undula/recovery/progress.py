"""Progress of a rank, which its training loop records and the controller polls."""

import time
from dataclasses import dataclass

STEP_TIMES_KEPT = 8
"""Number of recent steps whose durations are kept."""


@dataclass(frozen=True)
class ProgressView:
    """Progress of a rank at one moment."""

    step: int
    """Number of committed steps; -1 before the loop starts."""
    phase: str
    """Name of the phase: "starting", "data", "compute", "reduce" (in the collectives of a step), "other" or "left"."""
    phase_s: float
    """Seconds since the rank entered the phase."""
    longest_step_s: float
    """Duration in seconds of the longest of the last STEP_TIMES_KEPT steps; 0 before the first step."""
    began: int = -1
    """Number of committed steps with which the loop started; -1 before the loop starts."""


class Progress:
    """Progress of the rank in this process. The training loop records it, and the controller polls it."""

    def __init__(self) -> None:
        self._step = self._began = -1
        self._entered: tuple[str, float] = ("starting", time.monotonic())
        self._step_times: list[float] = []

    def enter(self, phase: str) -> None:
        self._entered = (phase, time.monotonic())

    def begin(self, step: int) -> None:
        """Record that the loop starts with `step` committed steps."""
        self._step = self._began = step

    def committed(self, step: int, seconds: float) -> None:
        self._step = step
        self._step_times = [*self._step_times[1 - STEP_TIMES_KEPT :], seconds]

    def view(self) -> ProgressView:
        phase, since = self._entered
        longest_s = max(self._step_times, default=0.0)
        return ProgressView(self._step, phase, time.monotonic() - since, longest_s, self._began)
