"""Charts of a run's report, with their curves over time and over samples. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from undula.report.data.curves import (
    AxisName,
    CurvePoints,
    downsample,
    logged_values,
    metric_curves,
    points_of,
    smooth,
    validation_curve,
)
from undula.report.data.run_record import RecordedRun
from undula.report.data.summary import Floats, column, throughput
from undula.report.render.ticks import nice_step, tick_text, ticks
from undula.report.text import printable

CURVE_POINTS = 2000
"""Maximum number of points of a large curve."""
SMALL_CURVE_POINTS = 500
"""Maximum number of points of a small or secondary curve."""
LOGGED_CHARTS = 24
"""Maximum number of charts of logged values."""

Shape = Literal["line", "steps", "points"]


@dataclass(frozen=True)
class Curve:
    """Curve of a chart."""

    label: str
    css: str
    """CSS classes of the curve."""
    points: CurvePoints
    y: Floats
    """Values; shape [points]. A value that is not finite leaves a gap."""
    shape: Shape = "line"
    only: AxisName | None = None
    """Only x axis on which the curve is shown; None for all."""


@dataclass(frozen=True)
class Chart:
    """Curves with a common y axis. The tooltip follows the points of the first curve."""

    key: str
    """Identifier of the chart on the page."""
    title: str
    unit: str
    height: Literal["tall", "middle", "low"]
    curves: tuple[Curve, ...]
    from_zero: bool = False
    """Whether the y axis includes 0."""
    is_small: bool = False
    """Whether the chart shares a row of the page with others."""

    def y_range(self) -> tuple[float, float]:
        """Return the bounds of the y axis. A few points far above all others are left out, because they would flatten the curve."""
        values = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in self.curves])
        if not len(values):
            return 0.0, 1.0
        low, high = float(values.min()), float(values.max())
        usual = float(np.quantile(values, 0.99))
        if len(values) > 100 and high > usual + 4 * (usual - low) > low:
            high = usual + (usual - low)
        low = min(low, 0.0) if self.from_zero else low
        pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        return (low if low == 0.0 else low - pad), high + pad


@dataclass(frozen=True)
class XAxis:
    """X axis that all charts share."""

    name: AxisName
    high: float
    """Upper bound; the lower bound is 0."""
    ticks: tuple[tuple[float, str], ...]
    """Positions and labels."""


def charts_of(run: RecordedRun, began: float) -> tuple[list[Chart], int]:
    """Return the charts of a run, and the number of logged values beyond LOGGED_CHARTS, which have no chart."""
    steps = run.ledger.steps
    if not len(steps):
        return [], 0
    points = points_of(steps, began)
    charts = [_loss_chart(run, points, began), _throughput_chart(run, points)]
    world_size, lr = column(steps, "world_size"), column(steps, "lr")
    charts.append(_plain_chart("world_size", "World size", "ranks", "low", "s-world", points, world_size))
    charts.append(_plain_chart("lr", "Learning rate", "", "middle", "s-lr", points, lr))
    charts += _metric_charts(run, began)
    logged = sorted(logged_values(steps).items())
    for place, (name, y) in enumerate(logged[:LOGGED_CHARTS]):
        rows = np.flatnonzero(~np.isnan(y))
        rows = rows[downsample(y[rows], SMALL_CURVE_POINTS)]
        title = printable(name, 80)
        curve = Curve(title, "s-logged", points.take(rows), y[rows])
        charts.append(Chart(f"logged-{place}", title, "", "middle", (curve,), is_small=True))
    return charts, max(len(logged) - LOGGED_CHARTS, 0)


def x_axis(name: AxisName, high: float) -> XAxis:
    """Return an x axis from 0 to `high`, with ticks in readable units."""
    unit, size, sign = "", 1.0, "$" if name == "dollars" else ""
    if name == "time":
        units = (("s", 1.0, 180.0), ("min", 60.0, 10_800.0), ("h", 3600.0, 259_200.0), ("d", 86_400.0, math.inf))
        unit, size = next((f" {unit}", size) for unit, size, most in units if high <= most)
    step = nice_step(high / size, 8)
    shown = [(tick * size, sign + tick_text(tick, step) + unit) for tick in ticks(0.0, high / size, step)]
    return XAxis(name, high, tuple(shown))


def x_axes(wall_s: float, samples: int) -> tuple[XAxis, XAxis]:
    """Return the x axes of a run that took `wall_s` seconds for `samples` samples."""
    return x_axis("time", max(wall_s, 1e-3)), x_axis("samples", float(max(samples, 1)))


def _loss_chart(run: RecordedRun, points: CurvePoints, began: float) -> Chart:
    loss = column(run.ledger.steps, "loss")
    rows = downsample(loss, CURVE_POINTS)
    at = points.take(rows)
    curves = [
        Curve("training", "s-loss faint", at, loss[rows]),
        Curve("smoothed", "s-loss", at, smooth(loss, smoothing_window(loss))[rows]),
    ]
    if len(run.ledger.replaced):
        lost, lost_y = points_of(run.ledger.replaced, began), column(run.ledger.replaced, "loss")
        rows = downsample(lost_y, SMALL_CURVE_POINTS)
        curves.append(Curve("lost and replayed", "s-lost lost", lost.take(rows), lost_y[rows], only="time"))
    validated, validated_y = validation_curve(run, began)
    if len(validated_y):
        rows = downsample(validated_y, SMALL_CURVE_POINTS)
        curves.append(Curve("validation", "point", validated.take(rows), validated_y[rows], "points"))
    return Chart("loss", "Loss", "", "tall", tuple(curves))


def _metric_charts(run: RecordedRun, began: float) -> Iterator[Chart]:
    for place, (name, (points, y)) in enumerate(metric_curves(run, began).items()):
        rows = downsample(y, SMALL_CURVE_POINTS)
        curve = Curve(printable(name, 80), "s-logged", points.take(rows), y[rows])
        yield Chart(f"metric-{place}", f"{printable(name, 80)} (validation)", "", "middle", (curve,), is_small=True)


def _throughput_chart(run: RecordedRun, points: CurvePoints) -> Chart:
    rate = throughput(run.ledger.steps)
    attempts = [rate[points.attempt == attempt] for attempt in np.unique(points.attempt)]
    # Each attempt is smoothed separately, because attempts can differ in world size and so in speed.
    smoothed = np.concatenate([smooth(each, smoothing_window(rate)) for each in attempts])
    rows = downsample(rate, CURVE_POINTS)
    at = points.take(rows)
    curves = Curve("samples/s", "s-rate faint", at, rate[rows]), Curve("smoothed", "s-rate", at, smoothed[rows])
    return Chart("throughput", "Throughput", "samples/s", "middle", curves, from_zero=True)


def _plain_chart(
    key: str, title: str, unit: str, height: Literal["middle", "low"], css: str, points: CurvePoints, y: Floats
) -> Chart:
    """Return a chart of one column of the ledger. A low chart draws its curve as steps."""
    rows = downsample(y, CURVE_POINTS)
    curve = Curve(title.lower(), css, points.take(rows), y[rows], "steps" if height == "low" else "line")
    return Chart(key, title, unit, height, (curve,), from_zero=True)


def smoothing_window(values: Sequence[float] | Floats) -> int:
    """Return the number of points over which a curve is smoothed. It is odd."""
    return min(max(len(values) // 40, 2), 250) * 2 + 1
