"""Where a rank stands: written by its training loop, read by the controller's polls."""

import time
from dataclasses import dataclass

STEP_TIMES_KEPT = 8


@dataclass(frozen=True)
class ProgressView:
    """Where a rank stands."""

    step: int
    """Steps committed; -1 before the loop has begun."""
    phase: str
    """"starting", "data", "compute", "reduce" (in the step's collectives), "other" or "left"."""
    phase_s: float
    """Seconds since it entered the phase."""
    longest_step_s: float
    """Of the last few steps; 0 before there are any."""
    began: int = -1
    """The step that the loop began with; -1 before."""


class Progress:
    """Where this process's rank stands; written by the loop, read by the controller's polls."""

    def __init__(self) -> None:
        self._step = self._began = -1
        self._entered: tuple[str, float] = ("starting", time.monotonic())
        self._step_times: list[float] = []

    def enter(self, phase: str) -> None:
        self._entered = (phase, time.monotonic())

    def begin(self, step: int) -> None:
        """The loop begins with `step`."""
        self._step = self._began = step

    def committed(self, step: int, seconds: float) -> None:
        self._step = step
        self._step_times = [*self._step_times[1 - STEP_TIMES_KEPT :], seconds]

    def view(self) -> ProgressView:
        phase, since = self._entered
        longest_s = max(self._step_times, default=0.0)
        return ProgressView(self._step, phase, time.monotonic() - since, longest_s, self._began)
