"""What was expected of a run before it began, beside what was measured. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from undula.report.text import DASH, counted, duration
from undula.state.events import EstimateEvent, Event, MemoryEvent
from undula.state.records import PARTS


@dataclass(frozen=True)
class Estimates:
    """Figures of the newest estimate of a run, and what its newest group has measured. Figures that do not exist are None."""

    bytes: float
    """Most memory of a GPU that tensors were expected to take in a step."""
    measured_bytes: float | None
    world_size: int | None
    """Number of workers with which most steps were made, of those for which a duration was estimated."""
    step_s: float | None
    """Expected duration of a step with that number of workers, in seconds."""
    measured_step_s: float | None
    """Median duration of these steps in seconds."""

    def lines(self) -> list[tuple[str, str, str]]:
        """Return labels, measured figures, and what was expected."""
        measured = DASH if self.measured_bytes is None else f"{self.measured_bytes / 2**30:.2f} GiB"
        lines = [("GPU memory", measured, f"at most; {self.bytes / 2**30:.2f} GiB expected")]
        if self.step_s is not None and self.measured_step_s is not None:
            workers = counted(self.world_size or 0, "worker")
            lines.append(
                ("step", duration(self.measured_step_s), f"median with {workers}; {duration(self.step_s)} expected")
            )
        return lines


def estimates_of(events: Sequence[Event], steps: pa.Table) -> Estimates | None:
    """Return the estimates of a run; None if it has none.

    Args:
        events: Events of the run.
        steps: Committed steps of its ledger.
    """
    expected = next((event for event in reversed(events) if isinstance(event, EstimateEvent)), None)
    if expected is None:
        return None
    later = (event for event in reversed(events) if isinstance(event, MemoryEvent) and event.time >= expected.time)
    memory = next((event.allocated_bytes for event in later), None)
    steps = steps.filter(pc.field("time") >= expected.time)
    sizes = np.asarray(steps["world_size"])
    counts = {int(size): int((sizes == int(size)).sum()) for size in expected.step_s}
    size = max(counts, key=lambda size: counts[size], default=None)
    if size is None or not counts[size]:
        return Estimates(expected.allocated_bytes, memory, None, None, None)
    seconds = np.nansum([np.asarray(steps[name], dtype=float) for name in PARTS], axis=0)[sizes == size]
    return Estimates(expected.allocated_bytes, memory, size, expected.step_s[str(size)], float(np.median(seconds)))
