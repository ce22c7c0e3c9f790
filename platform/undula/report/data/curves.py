"""Curves of a run over time or samples, with markers for its events, at the resolution of a plot. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, assert_never

import numpy as np
import pyarrow as pa

from undula.report.data.run_record import RecordedRun
from undula.report.data.summary import Floats, column, validations
from undula.state.events import Event

MARKED_KINDS = ("start", "resize", "crash", "notice", "checkpoint", "end")
"""Kinds of events that a chart marks."""

AxisName = Literal["time", "samples", "step", "dollars"]
"""Quantity on the x axis. The page of one run has the first two."""
Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class CurvePoints:
    """Positions of the points of a curve on the x axes. Each array has shape [points]."""

    time: Floats
    """Seconds since the start of the run."""
    samples: Floats
    """Number of consumed samples."""
    step: Floats
    """Number of committed steps."""
    attempt: Floats
    """Number of the attempt. A curve over time has a gap between two attempts."""
    dollars: Floats | None = None
    """Cost of the run's workers so far in US dollars; None if it is unknown."""

    def take(self, rows: Indices) -> "CurvePoints":
        dollars = None if self.dollars is None else self.dollars[rows]
        return CurvePoints(self.time[rows], self.samples[rows], self.step[rows], self.attempt[rows], dollars)

    def on(self, axis: AxisName) -> Floats | None:
        """Return the positions on an axis; None if they are unknown."""
        match axis:
            case "time":
                return self.time
            case "samples":
                return self.samples
            case "step":
                return self.step
            case "dollars":
                return self.dollars
            case _:
                assert_never(axis)


@dataclass(frozen=True)
class EventMarker:
    """Event and its position on the x axes of the page of one run."""

    event: Event
    time: float
    """Seconds since the start of the run."""
    samples: float
    """Number of consumed samples."""

    def on(self, axis: AxisName) -> float:
        assert axis in ("time", "samples"), "only the page of one run has markers"
        return self.time if axis == "time" else self.samples


def points_of(steps: pa.Table, began: float) -> CurvePoints:
    """Return the positions of rows of STEP_SCHEMA; `began` is the start of the run in seconds since the epoch."""
    time, samples, attempt = (column(steps, name) for name in ("time", "samples", "attempt"))
    return CurvePoints(time - began, samples, _steps_committed(steps), attempt)


def markers_of(events: Sequence[Event], steps: pa.Table, began: float) -> tuple[EventMarker, ...]:
    """Return markers for the events of MARKED_KINDS.

    The marker of an event without a step is at the last step before it that was committed and not replayed later.
    """
    times, committed = column(steps, "time"), _steps_committed(steps)
    samples = np.concatenate([[0.0], column(steps, "samples")])
    markers = []
    for event in events:
        if event.kind in MARKED_KINDS:
            before = (
                np.searchsorted(times, event.time)
                if event.step is None
                else np.searchsorted(committed, event.step, "right")
            )
            markers.append(EventMarker(event, event.time - began, float(samples[before])))
    return tuple(markers)


def validation_curve(run: RecordedRun, began: float) -> tuple[CurvePoints, Floats]:
    """Return the positions of the validations at committed steps, and their losses; shape [points]."""
    points = points_of(run.ledger.steps, began)
    samples_at = {0.0: 0.0, **dict(zip(points.step.tolist(), points.samples.tolist(), strict=True))}
    measured = [point for point in validations(run.events) if point.step in samples_at]
    rows = [(point.time - began, samples_at[point.step], float(point.step), 0.0, point.loss) for point in measured]
    time, samples, step, attempt, loss = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    return CurvePoints(time, samples, step, attempt), loss


def metric_curves(run: RecordedRun, began: float) -> dict[str, tuple[CurvePoints, Floats]]:
    """Return the positions and the values of the means that validations had beside the loss, by name; shape [points]."""
    points, _ = validation_curve(run, began)
    by_step = {point.step: point.metrics for point in validations(run.events)}
    metrics = [by_step[int(step)] for step in points.step]
    curves = {}
    for name in sorted({name for means in metrics for name in means}):
        rows = np.array([row for row, means in enumerate(metrics) if name in means])
        curves[name] = points.take(rows), np.array([metrics[row][name] for row in rows.tolist()], dtype=np.float64)
    return curves


def logged_values(steps: pa.Table) -> dict[str, Floats]:
    """Return the values that `step.log(...)` recorded, by name; shape [steps], with NaN for steps without a value.

    Names without a finite value are left out.
    """
    values: dict[str, Floats] = {}
    for row, text in enumerate(steps["logged"].to_pylist()):
        for name, value in json.loads(text).items() if text and text != "{}" else ():
            if isinstance(value, int | float):
                if name not in values:
                    values[name] = np.full(len(steps), np.nan)
                values[name][row] = value
    return {name: column for name, column in values.items() if np.isfinite(column).any()}


def downsample(ys: Floats, limit: int) -> Indices:
    """Return at most `limit` (4 or more) ascending indices of ys: both ends, and the smallest and largest value of each bucket."""
    if len(ys) <= limit:
        return np.arange(len(ys))
    edges = np.linspace(0, len(ys), (limit - 2) // 2 + 1).astype(np.int64)
    low, high = np.where(np.isfinite(ys), ys, np.inf), np.where(np.isfinite(ys), ys, -np.inf)
    kept = [0, len(ys) - 1]
    for start, stop in pairwise(edges.tolist()):
        kept += [start + int(low[start:stop].argmin()), start + int(high[start:stop].argmax())]
    return np.unique(np.array(kept))


def smooth(ys: Floats, window: int) -> Floats:
    """Return the mean of the finite values in a window of `window` (odd) points around each point, or NaN if it has none.

    Near the ends, the window shrinks symmetrically to as little as a third, and where it does not fit, a line through its values takes the
    place of their mean, so that the curve neither lags nor jumps there.
    """
    finite, half = np.isfinite(ys), window // 2
    values = np.where(finite, ys, 0.0)
    around, ones = slice(half, half + len(ys)), np.ones(2 * half + 1)
    sums, counts = np.convolve(values, ones)[around], np.convolve(finite.astype(np.float64), ones)[around].round()
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    for place in {*range(min(half, len(ys))), *range(max(len(ys) - half, 0), len(ys))}:
        reach = max(min(place, len(ys) - 1 - place), half // 3)
        xs = np.arange(max(place - reach, 0), min(place + reach + 1, len(ys)))
        xs = xs[finite[xs]]
        near = values[xs]
        means[place] = near.mean() if len(xs) else np.nan
        if len(xs) > 1:
            away, spread = place - xs.mean(), xs - xs.mean()
            line = means[place] + away * (spread @ near) / (spread @ spread)
            means[place] = np.clip(line, near.min(), near.max())
    return means


def _steps_committed(steps: pa.Table) -> Floats:
    """Return the number of steps of the plan that were committed after each row."""
    return column(steps, "step") + column(steps, "merged_steps")
