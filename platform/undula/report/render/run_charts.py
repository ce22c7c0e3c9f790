"""Charts of runs, with their curves over time, samples, steps or dollars, and the numbers for the tooltip. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from undula.report.data.curves import (
    MARKED_KINDS,
    AxisName,
    CurvePoints,
    EventMarker,
    downsample,
    logged_values,
    metric_curves,
    points_of,
    smooth,
    validation_curve,
)
from undula.report.data.run_record import RecordedRun
from undula.report.data.summary import Floats, column, throughput, without_nan
from undula.report.render.axes import Axis, linear_axis, nice_step, tick_text, ticks
from undula.report.render.chart import Chart, Key, Layer, Line, Points
from undula.report.text import printable

CURVE_POINTS = 2000
"""Maximum number of points of a large curve."""
SMALL_CURVE_POINTS = 500
"""Maximum number of points of a small or secondary curve."""
LOGGED_CHARTS = 24
"""Maximum number of charts of logged values."""
MAX_MARKERS = 2000
"""Maximum number of events for the tooltip."""
CHECKPOINT_HEIGHT = 0.055
"""Height of the marker of a checkpoint as a share of the plot. The markers of other events are as high as the plot."""
TARGET_TICKS = {"tall": 6, "middle": 4, "low": 2}

Shape = Literal["line", "steps", "points"]
Axes = dict[AxisName, Axis]
"""X axes that all charts of a page share."""


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

    def layer(self, name: AxisName) -> Layer | None:
        """Return the curve over an x axis; None if it is not shown there."""
        x = self.points.on(name)
        if x is None or self.only not in (None, name):
            return None
        if self.shape == "points":
            return Points(x, self.y, self.css)
        # No worker trains between two attempts, so a curve over time has a gap there.
        gaps = np.flatnonzero(np.diff(self.points.attempt)) + 1 if name == "time" else np.empty(0, dtype=int)
        return Line(np.insert(x, gaps, np.nan), np.insert(self.y, gaps, np.nan), self.css, "", self.shape == "steps")

    def key(self) -> Key:
        is_point = self.shape == "points"
        return Key(self.label, self.css, "circle" if is_point else None, is_line=not is_point)


@dataclass(frozen=True)
class RunChart:
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

    def over(self, name: AxisName, axis: Axis, markers: Sequence[EventMarker] = ()) -> Chart:
        """Return the chart over an x axis, with the markers of events."""
        low, high = self._y_range()
        if self.unit == "ranks":  # ticks at whole ranks, and at least two of them
            step = math.ceil((high - low) / 4)
            y = Axis(low, high, tuple((tick, tick_text(tick, step)) for tick in ticks(low, high, step)))
        else:
            y = linear_axis(low, high, TARGET_TICKS[self.height])
        shown = [(curve, layer) for curve in self.curves if (layer := curve.layer(name))]
        layers = [*_marker_lines(markers, name, y), *(layer for _, layer in shown)]
        keys = [curve.key() for curve, _ in shown] if len(shown) > 1 else ()
        above = int((self.curves[0].y > high).sum())
        note = f"{above:,} points above the plot" if above else ""
        return Chart(axis, y, layers, keys, "", self.key, self.title, self.unit, note, self.height, self.is_small)

    def tooltip(self) -> dict[str, Any]:
        """Return the numbers of the curves for run.js."""
        lead, entries = self.curves[0], []
        for curve in self.curves:
            entry: dict[str, Any] = {"label": curve.label, "y": _rounded(curve.y)}
            if curve is lead or curve.points is not lead.points:
                points = curve.points
                entry |= {"time": points.time.round(3).tolist()}
                entry |= {"samples": points.samples.astype(int).tolist(), "step": points.step.astype(int).tolist()}
                entry |= {} if points.dollars is None else {"dollars": _rounded(points.dollars)}
                entry |= {"sparse": True} if curve is not lead else {}
            entries.append(entry | ({"only": curve.only} if curve.only else {}))
        return {"curves": entries}

    def _y_range(self) -> tuple[float, float]:
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


def tooltip_data(charts: Sequence[RunChart], axes: Axes, markers: Sequence[EventMarker]) -> dict[str, Any]:
    """Return the numbers that run.js shows in the tooltip, as a JSON object."""
    tree: dict[str, Any] = without_nan(
        {
            "extent": {name: axis.high for name, axis in axes.items()},
            "charts": {chart.key: chart.tooltip() for chart in charts},
            "events": [
                {
                    "kind": marker.event.kind,
                    "message": printable(marker.event.message, 240),
                    "time": round(marker.time, 3),
                    "samples": marker.samples,
                }
                for marker in markers[-MAX_MARKERS:]
            ],
        }
    )
    return tree


def charts_of(run: RecordedRun, began: float) -> tuple[list[RunChart], int]:
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
        charts.append(RunChart(f"logged-{place}", title, "", "middle", (curve,), is_small=True))
    return charts, max(len(logged) - LOGGED_CHARTS, 0)


def x_axis(name: AxisName, high: float) -> Axis:
    """Return an x axis from 0 to `high`, with ticks in readable units."""
    unit, size, sign = "", 1.0, "$" if name == "dollars" else ""
    if name == "time":
        units = (("s", 1.0, 180.0), ("min", 60.0, 10_800.0), ("h", 3600.0, 259_200.0), ("d", 86_400.0, math.inf))
        unit, size = next((f" {unit}", size) for unit, size, most in units if high <= most)
    step = nice_step(high / size, 8)
    shown = [(tick * size, sign + tick_text(tick, step) + unit) for tick in ticks(0.0, high / size, step)]
    return Axis(0.0, high, tuple(shown))


def _loss_chart(run: RecordedRun, points: CurvePoints, began: float) -> RunChart:
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
    return RunChart("loss", "Loss", "", "tall", tuple(curves))


def _metric_charts(run: RecordedRun, began: float) -> Iterator[RunChart]:
    for place, (name, (points, y)) in enumerate(metric_curves(run, began).items()):
        rows = downsample(y, SMALL_CURVE_POINTS)
        curve = Curve(printable(name, 80), "s-logged", points.take(rows), y[rows])
        yield RunChart(f"metric-{place}", f"{printable(name, 80)} (validation)", "", "middle", (curve,), is_small=True)


def _throughput_chart(run: RecordedRun, points: CurvePoints) -> RunChart:
    rate = throughput(run.ledger.steps)
    attempts = [rate[points.attempt == attempt] for attempt in np.unique(points.attempt)]
    # Each attempt is smoothed separately, because attempts can differ in world size and so in speed.
    smoothed = np.concatenate([smooth(rates, smoothing_window(rate)) for rates in attempts])
    rows = downsample(rate, CURVE_POINTS)
    at = points.take(rows)
    curves = Curve("samples/s", "s-rate faint", at, rate[rows]), Curve("smoothed", "s-rate", at, smoothed[rows])
    return RunChart("throughput", "Throughput", "samples/s", "middle", curves, from_zero=True)


def _plain_chart(
    key: str, title: str, unit: str, height: Literal["middle", "low"], css: str, points: CurvePoints, y: Floats
) -> RunChart:
    """Return a chart of one column of the ledger. A low chart draws its curve as steps."""
    rows = downsample(y, CURVE_POINTS)
    curve = Curve(title.lower(), css, points.take(rows), y[rows], "steps" if height == "low" else "line")
    return RunChart(key, title, unit, height, (curve,), from_zero=True)


def smoothing_window(values: Sequence[float] | Floats) -> int:
    """Return the number of points over which a curve is smoothed. It is odd."""
    return min(max(len(values) // 40, 2), 250) * 2 + 1


def _marker_lines(markers: Sequence[EventMarker], name: AxisName, y: Axis) -> Iterator[Line]:
    for kind in MARKED_KINDS:
        xs = [marker.on(name) for marker in markers if marker.event.kind == kind]
        top = y.low + CHECKPOINT_HEIGHT * (y.high - y.low) if kind == "checkpoint" else y.high
        if xs:
            yield Line(np.repeat(xs, 3), np.tile([y.low, top, np.nan], len(xs)), f"mark e-{kind}")


def _rounded(values: Floats) -> list[float]:
    """Return values with six significant digits, and whole ones, such as counts, with all of their digits."""
    return [value if value.is_integer() else float(f"{value:.6g}") for value in values.tolist()]
