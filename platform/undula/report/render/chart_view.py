"""Charts as SVG shapes for the template, and as numbers for the tooltip. Pure.

The plot stretches with the page. Only curves and markers use coordinates that stretch; everything else uses percentages, so that text and
lines keep their size.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from undula.report.data.curves import MARKED_KINDS, EventMarker
from undula.report.data.summary import without_nan
from undula.report.render.charts import Chart, Curve, Shape, XAxis
from undula.report.render.ticks import nice_step, tick_text, ticks
from undula.report.text import printable

PLOT_WIDTH, PLOT_HEIGHT = 10_000, 1_000
"""Size of a plot in its own coordinates."""
CHECKPOINT_HEIGHT = 55
"""Height of the marker of a checkpoint. The markers of other events are as high as the plot."""
MAX_MARKERS = 2000
"""Maximum number of events for the tooltip."""
SEGMENTS: Mapping[Shape, str] = {"line": "L{x:.0f} {y:.0f}", "steps": "V{y:.0f}H{x:.0f}"}
"""Segment of an SVG path to the next point, by the shape of the curve."""
_TARGET_TICKS = {"tall": 6, "middle": 4, "low": 2}


@dataclass(frozen=True)
class TickView:
    """Tick of an axis."""

    position: str
    """Distance from the left or the top, in percent."""
    label: str
    anchor: str = "end"
    """`text-anchor` of the label."""
    css: str = ""


@dataclass(frozen=True)
class PathView:
    """Curve, or the markers of one kind of event."""

    css: str
    count: int
    """Number of points or events."""
    d: str
    """Path data."""


@dataclass(frozen=True)
class CircleView:
    """Point of a curve that is drawn as points."""

    css: str
    x: str
    """Distance from the left, in percent."""
    y: str
    """Distance from the top, in percent."""


@dataclass(frozen=True)
class KeyView:
    """Entry of a chart's legend."""

    label: str
    css: str
    is_point: bool


@dataclass(frozen=True)
class ChartView:
    """Chart on one x axis."""

    key: str
    title: str
    unit: str
    height: str
    axis: str
    keys: tuple[KeyView, ...]
    note: str
    """Remark beside the title; empty if there is none."""
    y_ticks: tuple[TickView, ...]
    x_ticks: tuple[TickView, ...]
    markers: tuple[PathView, ...]
    curves: tuple[PathView, ...]
    circles: tuple[CircleView, ...]
    is_small: bool
    """Whether the chart shares a row with others."""


def chart_view(chart: Chart, axis: XAxis, markers: Sequence[EventMarker]) -> ChartView:
    """Return a chart on an x axis, with the markers of events."""
    curves = [
        curve for curve in chart.curves if curve.only in (None, axis.name) and curve.points.on(axis.name) is not None
    ]
    low, high = chart.y_range()
    above = int((chart.curves[0].y > high).sum())
    return ChartView(
        key=chart.key,
        title=chart.title,
        unit=chart.unit,
        height=chart.height,
        axis=axis.name,
        keys=tuple(KeyView(each.label, each.css, each.shape == "points") for each in curves) if len(curves) > 1 else (),
        note=f"{above:,} points above the plot" if above else "",
        y_ticks=tuple(_y_ticks(chart, low, high)),
        x_ticks=tuple(_x_ticks(axis)),
        markers=tuple(_marker_paths(markers, axis)),
        curves=tuple(_curve_path(curve, axis, low, high) for curve in curves if curve.shape != "points"),
        circles=tuple(
            circle for curve in curves if curve.shape == "points" for circle in _circles(curve, axis, low, high)
        ),
        is_small=chart.is_small,
    )


def tooltip_data(charts: Sequence[Chart], axes: Sequence[XAxis], markers: Sequence[EventMarker]) -> dict[str, Any]:
    """Return the numbers that run.js shows in the tooltip, as a JSON object."""
    tree: dict[str, Any] = without_nan(
        {
            "extent": {axis.name: [0, axis.high] for axis in axes},
            "charts": {chart.key: {"curves": _curve_data(chart)} for chart in charts},
            "events": [_marker_data(marker) for marker in markers[-MAX_MARKERS:]],
        }
    )
    return tree


def _y_ticks(chart: Chart, low: float, high: float) -> Iterable[TickView]:
    step = nice_step(high - low, _TARGET_TICKS[chart.height])
    step = (
        math.ceil((high - low) / 4) if chart.key == "world_size" else step
    )  # ticks at whole ranks, and at least two of them
    for tick in ticks(low, high, step):
        yield TickView(f"{100 * (high - tick) / (high - low):.2f}%", tick_text(tick, step))


def _x_ticks(axis: XAxis) -> Iterable[TickView]:
    for place, (x, label) in enumerate(axis.ticks):
        anchor = "start" if place == 0 else "end" if x > 0.97 * axis.high else "middle"
        yield TickView(_percent(x, axis), label, anchor, "wide" if place % 2 else "")


def _curve_path(curve: Curve, axis: XAxis, low: float, high: float) -> PathView:
    positions = curve.points.on(axis.name)
    assert positions is not None, "chart_view leaves out curves without positions"
    xs = np.rint(positions / axis.high * PLOT_WIDTH)
    ys = np.rint(np.clip((high - curve.y) / (high - low), -9, 9) * PLOT_HEIGHT)
    parts, drawn, before = [], 0, math.nan
    for x, y, attempt in zip(xs.tolist(), ys.tolist(), curve.points.attempt.tolist(), strict=True):
        if math.isnan(y):
            before = math.nan
            continue
        # No worker trains between two attempts, so a curve over time has a gap there.
        is_joined = attempt == before or (axis.name != "time" and not math.isnan(before))
        if not is_joined:
            parts.append(f"M{x:.0f} {y:.0f}h0")
        else:
            parts.append(SEGMENTS[curve.shape].format(x=x, y=y))
        drawn, before = drawn + 1, attempt
    return PathView(f"curve {curve.css}", drawn, "".join(parts))


def _circles(curve: Curve, axis: XAxis, low: float, high: float) -> Iterable[CircleView]:
    positions = curve.points.on(axis.name)
    assert positions is not None, "chart_view leaves out curves without positions"
    for x, y in zip(positions.tolist(), curve.y.tolist(), strict=True):
        if math.isfinite(y) and low <= y <= high:
            yield CircleView(curve.css, _percent(x, axis), f"{100 * (high - y) / (high - low):.2f}%")


def _marker_paths(markers: Sequence[EventMarker], axis: XAxis) -> Iterable[PathView]:
    for kind in MARKED_KINDS:
        xs = [marker.on(axis.name) for marker in markers if marker.event.kind == kind]
        top = PLOT_HEIGHT - CHECKPOINT_HEIGHT if kind == "checkpoint" else 0
        if xs:
            d = "".join(f"M{x / axis.high * PLOT_WIDTH:.0f} {PLOT_HEIGHT}V{top}" for x in xs)
            yield PathView(f"mark e-{kind}", len(xs), d)


def _curve_data(chart: Chart) -> list[dict[str, Any]]:
    lead, entries = chart.curves[0], []
    for curve in chart.curves:
        entry: dict[str, Any] = {"label": curve.label, "y": [float(f"{y:.6g}") for y in curve.y.tolist()]}
        if curve is lead or curve.points is not lead.points:
            points = curve.points
            entry |= {"time": points.time.round(3).tolist()}
            entry |= {"samples": points.samples.astype(int).tolist(), "step": points.step.astype(int).tolist()}
            if points.dollars is not None:
                entry |= {"dollars": [float(f"{dollars:.6g}") for dollars in points.dollars.tolist()]}
            entry |= {"sparse": True} if curve is not lead else {}
        entries.append(entry | ({"only": curve.only} if curve.only else {}))
    return entries


def _marker_data(marker: EventMarker) -> dict[str, Any]:
    message = printable(marker.event.message, 240)
    return {"kind": marker.event.kind, "message": message, "time": round(marker.time, 3), "samples": marker.samples}


def _percent(x: float, axis: XAxis) -> str:
    return f"{100 * x / axis.high:.3f}%"
