"""The report page: one self-contained HTML file with a run's figures, curves, events and spec; it asks nothing of the network.

The charts are SVG whose plot stretches with the page while lines and text keep their size. What the run itself wrote (names, messages,
logged values) is escaped, and a Content-Security-Policy lets no script run but the page's own.
"""

import base64
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Literal

import numpy as np
import yaml

from undula.report.data.cost import Cost, PriceFinder, cost_of
from undula.report.data.summary import (
    MARKED_KINDS,
    SECONDS_CLASSES,
    AxisName,
    Floats,
    Mark,
    Places,
    RecordedRun,
    RunSummary,
    column,
    counted,
    downsample,
    duration,
    goodput_words,
    logged_values,
    marks_of,
    nice_step,
    number,
    places_of,
    printable,
    read_run,
    smooth,
    summarize,
    throughput,
    tick_text,
    ticks,
    validation_curve,
    without_nan,
)
from undula.report.render.cost_section import cost_section
from undula.state.events import Event
from undula.storage import Store

PAGE = "report.html"
CURVE_POINTS = 2000
SMALL_CURVE_POINTS = 500
LOGGED_CHARTS = 24
TABLE_EVENTS = 400
Shape = Literal["line", "steps", "points"]
_WIDE, _HIGH = 10_000, 1_000  # the plot's own coordinates, stretched to the page


@dataclass(frozen=True)
class Track:
    """A curve of a chart."""

    label: str
    css: str
    places: Places
    y: Floats
    shape: Shape = "line"
    only: AxisName | None = None
    """The one axis on which it is drawn; by default both."""


@dataclass(frozen=True)
class Chart:
    """Tracks over a common extent. The tooltip follows the first; those that share its places are read there too."""

    key: str
    title: str
    unit: str
    height: Literal["tall", "middle", "low"]
    tracks: tuple[Track, ...]
    from_zero: bool = False

    def domain(self) -> tuple[float, float]:
        """The y axis. A few points far above all others are left out, so that they do not press the curve flat."""
        values = np.concatenate([track.y[np.isfinite(track.y)] for track in self.tracks])
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
class Axis:
    """The x axis that all charts share."""

    name: AxisName
    high: float
    ticks: tuple[tuple[float, str], ...]

    def percent(self, x: float) -> str:
        return f"{100 * x / self.high:.3f}%"


def write_report(store: Store, prices: PriceFinder | None = None, *, now: float | None = None) -> str:
    """Write report.html into a run directory, with what the run has cost by those prices; returns its path or URL."""
    run = read_run(store)
    summary = summarize(run.ledger, run.job, time.time() if now is None else now)
    cost = cost_of(run, prices) if prices else None
    store.write(PAGE, render(run, summary, cost).encode())
    return f"{store.url.rstrip('/')}/{PAGE}"


def render(run: RecordedRun, summary: RunSummary, cost: Cost | None = None) -> str:
    """The page as HTML."""
    steps, began = run.ledger.steps, summary.began or 0.0
    marks = marks_of(run.events, steps, began)
    charts, left_out = _charts(run, began)
    axes = _axis("time", max(summary.wall_s, 1e-3)), _axis("samples", float(max(summary.samples, 1)))
    charted = [_charts_section(charts, axes, marks, left_out), _seconds_section(summary)]
    data = {
        "extent": {axis.name: [0, axis.high] for axis in axes},
        "charts": {chart.key: {"tracks": _track_data(chart)} for chart in charts},
        "events": [_mark_data(mark) for mark in marks[-CURVE_POINTS:]],
    }
    template = (files("undula.report.render") / "page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        name=escape(printable(run.job.name)),
        state=summary.state,
        under=_under(run, summary),
        tiles=_tiles(summary),
        charts="".join(charted) if charts else "<h2>Curves</h2><p>No step has been committed yet.</p>",
        cost=cost_section(cost) if cost else "",
        events=_event_rows(run.events),
        spec=escape(yaml.safe_dump(dict(run.job.spec), sort_keys=False, allow_unicode=True)),
        latest=_utc(summary.latest) if summary.latest is not None else "not there yet",
        data=json.dumps(without_nan(data), separators=(",", ":")).replace("<", "\\u003c"),
        style_hash=_hash_of("style", template),
        script_hash=_hash_of("script", template),
    )


def _hash_of(tag: str, template: str) -> str:
    text = template.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"


def _charts(run: RecordedRun, began: float) -> tuple[list[Chart], int]:
    """The charts of a run, and how many logged values got none."""
    steps = run.ledger.steps
    if not len(steps):
        return [], 0
    places, loss, rate = places_of(steps, began), column(steps, "loss"), throughput(steps)
    window = min(max(len(loss) // 40, 2), 250) * 2 + 1
    chosen = downsample(loss, CURVE_POINTS)
    at = places.take(chosen)
    tracks = [
        Track("training", "s-loss faint", at, loss[chosen]),
        Track("smoothed", "s-loss", at, smooth(loss, window)[chosen]),
    ]
    if len(run.ledger.replaced):
        lost, lost_y = places_of(run.ledger.replaced, began), column(run.ledger.replaced, "loss")
        kept = downsample(lost_y, SMALL_CURVE_POINTS)
        tracks.append(Track("done again later", "s-lost lost", lost.take(kept), lost_y[kept], only="time"))
    checked, checked_y = validation_curve(run, began)
    if len(checked_y):
        kept = downsample(checked_y, SMALL_CURVE_POINTS)
        tracks.append(Track("validation", "point", checked.take(kept), checked_y[kept], "points"))
    charts = [Chart("loss", "Loss", "", "tall", tuple(tracks))]
    # Smoothed within each attempt: the speed of another world size has no part in it.
    pace = np.concatenate([smooth(rate[places.attempt == attempt], window) for attempt in np.unique(places.attempt)])
    chosen = downsample(rate, CURVE_POINTS)
    at = places.take(chosen)
    speed = (
        Track("samples/s", "s-rate faint", at, rate[chosen]),
        Track("smoothed", "s-rate", at, pace[chosen]),
    )
    charts.append(Chart("throughput", "Throughput", "samples/s", "middle", speed, from_zero=True))
    for key, title, unit, css in (
        ("world_size", "World size", "ranks", "s-world"),
        ("lr", "Learning rate", "", "s-lr"),
    ):
        y = column(steps, key)
        chosen = downsample(y, CURVE_POINTS)
        shape: Shape = "steps" if key == "world_size" else "line"
        track = Track(title.lower(), css, places.take(chosen), y[chosen], shape)
        charts.append(Chart(key, title, unit, "low" if shape == "steps" else "middle", (track,), from_zero=True))
    logged = logged_values(steps)
    for place, (name, y) in enumerate(sorted(logged.items())[:LOGGED_CHARTS]):
        rows = np.flatnonzero(~np.isnan(y))
        rows = rows[downsample(y[rows], SMALL_CURVE_POINTS)]
        track = Track(printable(name, 80), "s-logged", places.take(rows), y[rows])
        charts.append(Chart(f"logged-{place}", printable(name, 80), "", "middle", (track,)))
    return charts, max(len(logged) - LOGGED_CHARTS, 0)


def _axis(name: AxisName, high: float) -> Axis:
    unit, size = "", 1.0
    if name == "time":
        units = (("s", 1.0, 180.0), ("min", 60.0, 10_800.0), ("h", 3600.0, 259_200.0), ("d", 86_400.0, math.inf))
        unit, size = next((f" {unit}", size) for unit, size, most in units if high <= most)
    step = nice_step(high / size, 8)
    shown = [(tick * size, tick_text(tick, step) + unit) for tick in ticks(0.0, high / size, step)]
    return Axis(name, high, tuple(shown))


def _charts_section(charts: Sequence[Chart], axes: Sequence[Axis], marks: Sequence[Mark], left_out: int) -> str:
    kinds = [kind for kind in MARKED_KINDS if any(mark.event.kind == kind for mark in marks)]
    keys = "".join(f"<li>{_mark_key(kind)}{kind}</li>" for kind in kinds)
    large = [chart for chart in charts if not chart.key.startswith("logged-")]
    small = charts[len(large) :]
    views = []
    for axis in axes:
        figures = "".join(_figure(chart, axis, marks) for chart in large)
        if small:
            figures += f'<div class="small">{"".join(_figure(chart, axis, marks) for chart in small)}</div>'
        views.append(f'<div class="view {axis.name}" data-axis="{axis.name}">{figures}</div>')
    note = f'<p class="foot">{left_out} more logged values are in the ledger.</p>' if left_out else ""
    return (
        '<section class="charts"><div class="bar"><h2>Curves</h2><div class="axes" role="radiogroup" aria-label="x axis">'
        '<label><input type="radio" name="axis" id="by-time" checked>wall time</label>'
        '<label><input type="radio" name="axis" id="by-samples">samples</label></div></div>'
        f'<div class="card"><ul class="keys events" aria-label="events">{keys}</ul>{"".join(views)}{note}</div></section>'
    )


def _figure(chart: Chart, axis: Axis, marks: Sequence[Mark]) -> str:
    tracks = [track for track in chart.tracks if track.only in (None, axis.name)]
    low, high = chart.domain()
    step = nice_step(high - low, {"tall": 6, "middle": 4, "low": 2}[chart.height])
    step = math.ceil((high - low) / 4) if chart.key == "world_size" else step  # whole ranks, more than one label
    rows = [(f"{100 * (high - tick) / (high - low):.2f}%", tick_text(tick, step)) for tick in ticks(low, high, step)]
    grid = "".join(f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/>' for y, _ in rows)
    y_texts = "".join(f'<text x="100%" y="{y}" dx="-8" dy="4" text-anchor="end">{text}</text>' for y, text in rows)
    x_texts = "".join(
        f'<text{" class=" + chr(34) + "wide" + chr(34) if place % 2 else ""} x="{axis.percent(x)}" y="18" '
        f'text-anchor="{"start" if place == 0 else "end" if x > 0.97 * axis.high else "middle"}">{text}</text>'
        for place, (x, text) in enumerate(axis.ticks)
    )
    curves = "".join(_curve(track, axis, low, high) for track in tracks if track.shape != "points")
    points = "".join(_points(track, axis, low, high) for track in tracks if track.shape == "points")
    keys = "".join(f"<li>{_track_key(track)}{escape(track.label)}</li>" for track in tracks) if len(tracks) > 1 else ""
    above = sum(int((track.y > high).sum()) for track in tracks[:1])
    note = f'<span class="unit">{above:,} points lie above</span>' if above else ""
    unit = f' <span class="unit">{chart.unit}</span>' if chart.unit else ""
    return (
        f'<figure class="chart {chart.height}" data-key="{chart.key}"><figcaption><h3>{escape(chart.title)}{unit}</h3>'
        f'<ul class="keys">{keys}</ul>{note}</figcaption><div class="frame"><svg class="y" aria-hidden="true">{y_texts}</svg>'
        f'<svg class="plot" data-chart="{chart.key}" tabindex="0" role="img" aria-label="{escape(chart.title)} over {axis.name}">'
        f'{grid}<svg width="100%" height="100%" viewBox="0 0 {_WIDE} {_HIGH}" preserveAspectRatio="none">'
        f'{_mark_paths(marks, axis)}{curves}</svg><line class="base" x2="100%" y1="100%" y2="100%"/>{points}</svg>'
        f'<svg class="x" aria-hidden="true">{x_texts}</svg></div></figure>'
    )


def _curve(track: Track, axis: Axis, low: float, high: float) -> str:
    xs = np.rint(track.places.on(axis.name) / axis.high * _WIDE)
    ys = np.rint(np.clip((high - track.y) / (high - low), -9, 9) * _HIGH)
    parts, drawn, before = [], 0, math.nan
    for x, y, attempt in zip(xs.tolist(), ys.tolist(), track.places.attempt.tolist(), strict=True):
        if math.isnan(y):
            before = math.nan
            continue
        # Between two attempts nobody trained: over time the curve has a gap there.
        joined = attempt == before or (axis.name == "samples" and not math.isnan(before))
        if not joined:
            parts.append(f"M{x:.0f} {y:.0f}h0")
        else:
            parts.append(f"V{y:.0f}H{x:.0f}" if track.shape == "steps" else f"L{x:.0f} {y:.0f}")
        drawn, before = drawn + 1, attempt
    return f'<path class="curve {track.css}" data-points="{drawn}" d="{"".join(parts)}"/>'


def _points(track: Track, axis: Axis, low: float, high: float) -> str:
    return "".join(
        f'<circle class="{track.css}" cx="{axis.percent(x)}" cy="{100 * (high - y) / (high - low):.2f}%" r="3.5"/>'
        for x, y in zip(track.places.on(axis.name).tolist(), track.y.tolist(), strict=True)
        if math.isfinite(y) and low <= y <= high
    )


def _mark_paths(marks: Sequence[Mark], axis: Axis) -> str:
    paths = []
    for kind in MARKED_KINDS:
        xs = [mark.on(axis.name) for mark in marks if mark.event.kind == kind]
        top = _HIGH - 55 if kind == "checkpoint" else 0
        d = "".join(f"M{x / axis.high * _WIDE:.0f} {_HIGH}V{top}" for x in xs)
        paths.append(f'<path class="mark e-{kind}" data-count="{len(xs)}" d="{d}"/>' if xs else "")
    return "".join(paths)


def _mark_key(kind: str) -> str:
    line = f'<path class="mark e-{kind}" d="M9 14V{6 if kind == "checkpoint" else -2}"/>'
    return f'<svg viewBox="0 0 18 12" aria-hidden="true">{line if kind in MARKED_KINDS else ""}</svg>'


def _track_key(track: Track) -> str:
    line, point = (
        f'<path class="curve {track.css}" d="M0 6H18"/>',
        f'<circle class="{track.css}" cx="9" cy="6" r="3.5"/>',
    )
    return f'<svg viewBox="0 0 18 12" aria-hidden="true">{point if track.shape == "points" else line}</svg>'


def _track_data(chart: Chart) -> list[dict[str, Any]]:
    lead, told = chart.tracks[0], []
    for track in chart.tracks:
        entry: dict[str, Any] = {"label": track.label, "y": [float(f"{y:.6g}") for y in track.y.tolist()]}
        if track is lead or track.places is not lead.places:
            places = track.places
            entry |= {"time": places.time.round(3).tolist()}
            entry |= {"samples": places.samples.astype(int).tolist(), "step": places.step.astype(int).tolist()}
            entry |= {"sparse": True} if track is not lead else {}
        told.append(entry | ({"only": track.only} if track.only else {}))
    return told


def _mark_data(mark: Mark) -> dict[str, Any]:
    message = printable(mark.event.message, 240)
    return {"kind": mark.event.kind, "message": message, "time": round(mark.time, 3), "samples": mark.samples}


def _under(run: RecordedRun, summary: RunSummary) -> str:
    sizes = summary.world_sizes
    parts = (
        f"started {_utc(summary.began)} UTC" if summary.began is not None else "not started yet",
        f"{sizes[0]}–{sizes[-1]} ranks" if len(sizes) > 1 else f"world size {sizes[0]}" if sizes else "",
        f"{run.job.train_rows:,} training samples" if run.job.train_rows else "",
        f"plan {printable(run.job.plan_digest)[:12]}" if run.job.plan_digest else "",
    )
    return " · ".join(escape(part) for part in parts if part)


def _tiles(summary: RunSummary) -> str:
    best = summary.best_validation_loss
    tiles = (
        (
            "validation loss",
            number(summary.last_validation_loss),
            f"best {number(best)} at step {summary.best_validation_step:,}" if best is not None else "no validation",
        ),
        ("training loss", number(summary.training_loss), "mean of the last 20 steps"),
        ("steps", f"{summary.steps:,}", f"of {summary.total_steps:,}"),
        ("samples", f"{summary.samples:,}", f"of {summary.total_samples:,}"),
        ("samples/s", number(summary.samples_per_s), "median over steps"),
        ("wall time", duration(summary.wall_s), f"{counted(summary.checkpoints, 'checkpoint')}"),
        ("replayed steps", f"{summary.replayed_steps:,}", "lost and done again"),
        (
            "attempts",
            f"{summary.attempts:,}",
            f"{counted(summary.crashes, 'crash', 'crashes')}, {counted(summary.resizes, 'resize')}",
        ),
    )
    shown = (
        f'<div class="tile"><dt>{dt}</dt><dd>{dd}</dd><dd class="note">{note}</dd></div>' for dt, dd, note in tiles
    )
    return "".join(shown)


def _seconds_section(summary: RunSummary) -> str:
    total = sum(summary.seconds.values()) or 1.0
    bars, keys, x = "", "", 0.0
    for name in SECONDS_CLASSES:
        share = summary.seconds[name] / total
        bars += f'<rect class="c-{name}" x="{x:.3%}" width="{share:.3%}" height="100%"/>'
        swatch = f'<svg viewBox="0 0 18 12" aria-hidden="true"><rect class="c-{name}" x="3" width="12" height="12" rx="2"/></svg>'
        keys += f"<li>{swatch}{name} <b>{duration(summary.seconds[name])}</b> {share:.1%}</li>"
        x += share
    return (
        f'<h2>Where the seconds of the steps went</h2><div class="card"><svg class="share" role="img" '
        f'aria-label="seconds by class">{bars}</svg><ul class="keys">{keys}</ul>'
        f"<p>Goodput: {escape(goodput_words(summary))}</p></div>"
    )


def _event_rows(events: Sequence[Event]) -> str:
    fewer = [event for event in events if event.kind != "checkpoint"] if len(events) > TABLE_EVENTS else list(events)
    shown = fewer[-TABLE_EVENTS:]
    left_out = len(events) - len(shown)
    rows = [
        f'<tr><td class="t"><span class="wide">{_utc(event.time)[:10]} </span>{_utc(event.time)[11:]}</td>'
        f'<td class="n">{"–" if event.step is None else f"{event.step:,}"}</td>'
        f'<td class="k">{_mark_key(event.kind)}{escape(printable(event.kind, 20))}</td>'
        f"<td>{escape(printable(event.message))}</td></tr>"
        for event in shown
    ]
    note = (
        f"{left_out:,} more events are in the ledger." if left_out else "" if events else "No event has been told yet."
    )
    return "".join(rows) + (f'<tr><td class="soft" colspan="4">{note}</td></tr>' if note else "")


def _utc(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S")
