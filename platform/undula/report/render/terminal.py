"""Runs and their figures in the terminal: tables and small plots for a person, one JSON document for a program."""

import json as json_format
import math
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from undula.errors import UndulaError
from undula.report.data.cost import DOING, Cost, PriceFinder, cost_of, cost_rows, dollars
from undula.report.data.summary import (
    SECONDS_CLASSES,
    Floats,
    RecordedRun,
    RunSummary,
    column,
    counted,
    downsample,
    duration,
    goodput_words,
    number,
    printable,
    read_run,
    summarize,
    throughput,
    tick_text,
    validation_curve,
    without_nan,
)
from undula.state.directory import JOB_FILE, STUDY_FILE
from undula.state.events import Event
from undula.state.ledger import LEDGER
from undula.storage import Entry, Store

EVENTS_SHOWN = 12
ROUTINE = ("checkpoint", "validation", "loss", "snapshot")
SIDE_BY_SIDE_WIDTH = 110
PLOT_ROWS = 9
_AXIS_WIDTH = 9
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # of a braille character, [row, column]
_BARS = " ▁▂▃▄▅▆▇█"
_STATE_STYLE = {"finished": "green", "running": "cyan", "stopped": "yellow", "unreadable": "red"}
_KIND_STYLE = {
    "crash": "red",
    "notice": "yellow",
    "warning": "yellow",
    "resize": "magenta",
    "end": "green",
    "start": "cyan",
}
_CLASS_STYLE = {"compute": "blue", "communication": "magenta", "data": "yellow", "other": "white"}
_SPENT_STYLE = {
    "useful": "green",
    "replayed": "red",
    "restarting": "cyan",
    "checkpoint": "white",
    "data": "yellow",
    "capacity": "magenta",
}


class Extent(NamedTuple):
    """What a plot shows of the plane."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float


def print_runs(
    store_of_runs: Store, json: bool = False, *, now: float | None = None, console: Console | None = None
) -> None:
    """List the runs below a URL, newest first; those that cannot be read come last, with the reason."""
    now = time.time() if now is None else now
    summaries: dict[str, RunSummary] = {}
    reasons: dict[str, str] = {}
    entries = store_of_runs.list()
    studies = _folders_with(entries, STUDY_FILE)
    for folder in _folders_with(entries, JOB_FILE, LEDGER):
        try:
            run = read_run(store_of_runs / folder)
            summaries[folder] = summarize(run.ledger, run.job, now)
        except UndulaError as error:
            reasons[folder] = str(error)
    newest_first = sorted(summaries, key=lambda folder: -(summaries[folder].latest or 0.0))
    if json:
        rows = [{"run": folder, **summaries[folder].as_json()} for folder in newest_first]
        _print_json([*rows, *({"run": folder, "error": reason} for folder, reason in reasons.items())])
        return
    console = console or Console()
    if not (summaries or reasons or studies):
        console.print(Text(f"no runs below {store_of_runs.url}"))
        return
    if summaries or reasons:
        console.print(_runs_table([(folder, summaries[folder]) for folder in newest_first], list(reasons), now))
    for folder in studies:
        url = f"{store_of_runs.url.rstrip('/')}/{folder}"
        console.print(Text(f"{printable(folder)} is a study: undula study status {printable(url)}"), soft_wrap=True)
    for reason in reasons.values():
        console.print(Text(f"unreadable: {printable(reason)}"))


def print_run(
    store: Store,
    json: bool = False,
    prices: PriceFinder | None = None,
    *,
    now: float | None = None,
    console: Console | None = None,
) -> None:
    """Show a run: its figures, what it has cost, its newest events, where the seconds went, and its curves."""
    run = read_run(store)
    summary = summarize(run.ledger, run.job, time.time() if now is None else now)
    cost = cost_of(run, prices) if prices else None
    if json:
        shown = [event.row() | {"data": event.data} for event in run.events[-EVENTS_SHOWN:]]
        spent = cost.as_json() if cost else None
        _print_json({**summary.as_json(), "cost": spent, "plan_digest": run.job.plan_digest, "events": shown})
        return
    console = console or Console()
    wide = console.width >= SIDE_BY_SIDE_WIDTH
    figures = _beside([_summary_table(summary), _seconds_table(summary)], wide)
    console.print(Text.assemble((printable(summary.name), "bold"), "  ", _state_text(summary.state)))
    console.print(figures)
    if cost:
        console.print(Group(*_cost_tables(cost)))
    if not len(run.ledger.steps):
        console.print(Text("\nno step has been committed yet"))
    elif console.encoding.startswith("utf"):
        width = (console.width - 4) // 2 if wide else min(console.width, 100)
        console.print(_beside([loss_plot(run, width), speed_plot(run, width)], wide))
    console.print(_events_table(run.events))


def plot(
    xs: Sequence[float] | Floats,
    ys: Sequence[float] | Floats,
    width: int,
    height: int,
    extent: Extent | None = None,
) -> list[str]:
    """A curve in braille: `height` strings of `width` characters, the largest y on top.

    Points are joined in their order; a value that is not finite leaves a gap. xs must ascend.
    """
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    kept = downsample(y, 16 * width)
    x, y = x[kept], y[kept]
    dots = np.zeros((height * 4, width * 2), dtype=bool)
    extent = extent or extent_of(x, y)
    column_of, row_of = _scale(x, extent[:2], width * 2), height * 4 - 1 - _scale(y, extent[2:], height * 4)
    finite = np.isfinite(x) & np.isfinite(y)
    for place in np.flatnonzero(finite).tolist():
        before = place - 1 if place and finite[place - 1] else place
        reach = max(abs(column_of[place] - column_of[before]), abs(row_of[place] - row_of[before]))
        along = np.linspace(0.0, 1.0, int(np.ceil(reach)) + 1)
        rows = np.rint(row_of[before] + along * (row_of[place] - row_of[before])).astype(int)
        columns = np.rint(column_of[before] + along * (column_of[place] - column_of[before])).astype(int)
        inside = (rows >= 0) & (rows < height * 4) & (columns >= 0) & (columns < width * 2)
        dots[rows[inside], columns[inside]] = True
    # [rows * 4, columns * 2] -> [rows, 4, columns, 2] -> [rows, columns]
    codes = (dots.reshape(height, 4, width, 2) * _DOTS[None, :, None, :]).sum(axis=(1, 3))
    return ["".join(chr(0x2800 + code) if code else " " for code in row) for row in codes.tolist()]


def strip(values: Sequence[float] | Floats, width: int) -> str:
    """Values as one line of bars, the largest full height; 0 or NaN is blank, anything above 0 shows."""
    held = np.asarray(values, dtype=np.float64)
    if not len(held):
        return " " * width
    cells = held[np.linspace(0, len(held) - 1, width).round().astype(int)]
    top = float(np.nanmax(cells, initial=0.0)) or 1.0
    return "".join(_BARS[math.ceil(cell / top * 8)] if math.isfinite(cell) and cell > 0 else " " for cell in cells)


def extent_of(x: Floats, y: Floats) -> Extent:
    """The extent that holds every finite point, never empty."""
    shown = np.isfinite(x) & np.isfinite(y)
    if not shown.any():
        return Extent(0.0, 1.0, 0.0, 1.0)
    x_low, x_high, y_low, y_high = (float(v) for v in (x[shown].min(), x[shown].max(), y[shown].min(), y[shown].max()))
    pad = 0.0 if y_high > y_low else abs(y_high) * 0.1 or 1.0
    return Extent(x_low, x_high if x_high > x_low else x_low + 1.0, y_low - pad, y_high + pad)


def loss_plot(run: RecordedRun, width: int) -> RenderableType:
    """Training loss over samples, validations as dots."""
    steps = run.ledger.steps
    x, y = column(steps, "samples"), column(steps, "loss")
    points, point_y = validation_curve(run, 0.0)
    point_x = points.samples
    extent = extent_of(np.concatenate([[0.0], x, point_x]), np.concatenate([y[:1], y, point_y]))
    inner = width - _AXIS_WIDTH
    lines = [Text(line, style="blue") for line in plot(x, y, inner, PLOT_ROWS, extent)]
    columns, rows = _scale(point_x, extent[:2], inner), PLOT_ROWS - 1 - _scale(point_y, extent[2:], PLOT_ROWS)
    for place in np.flatnonzero(np.isfinite(rows)).tolist():
        at = round(columns[place])
        line = lines[round(rows[place])]
        lines[round(rows[place])] = Text.assemble(line[:at], ("●", "bold yellow"), line[at + 1 :])
    title = Text.assemble(("loss", "bold"), " over samples   ", ("⠤⠤", "blue"), " training")
    return _framed(
        title.append_text(Text.assemble("  ", ("●", "bold yellow"), " validation") if len(point_y) else Text()),
        lines,
        extent,
        "0",
        f"{int(extent.x_high):,}",
    )


def speed_plot(run: RecordedRun, width: int) -> RenderableType:
    """Samples per second over time, and below it the world size; blank where nobody trained."""
    steps = run.ledger.steps
    inner = width - _AXIS_WIDTH
    began = min([event.time for event in run.events[:1]] + column(steps, "time")[:1].tolist())
    x, y, sizes = column(steps, "time") - began, throughput(steps), column(steps, "world_size")
    restarts = np.flatnonzero(np.diff(column(steps, "attempt"))) + 1
    found = extent_of(x, y)
    extent = Extent(0.0, max(found.x_high, 1e-3), 0.0, found.y_high)
    drawn = plot(np.insert(x, restarts, x[restarts]), np.insert(y, restarts, np.nan), inner, PLOT_ROWS - 2, extent)
    # A character stands for the step that was committed at the end of its span of time, or next.
    ends = np.arange(1, inner + 1) / inner * extent.x_high
    following = np.minimum(np.searchsorted(x, ends), len(x) - 1)
    began_at = x[following] - column(steps, "step_samples")[following] / y[following]
    idle = np.isin(following, restarts) & (began_at > ends)
    low, high = int(sizes.min()), int(sizes.max())
    ranks = f" ({low}–{high})" if low < high else f" ({high})"
    title = Text.assemble(("samples/s", "bold"), " and ", ("world size", "bold"), f"{ranks} over time")
    framed = _framed(title, [Text(line, style="green") for line in drawn], extent, "0 s", duration(extent.x_high))
    bars = (strip(np.where(idle, 0.0, sizes[following]), inner), "magenta")
    return Group(framed, Text.assemble(("ranks".rjust(_AXIS_WIDTH - 1) + " ", "dim"), bars))


def _framed(title: Text, lines: Sequence[Text], extent: Extent, x_low: str, x_high: str) -> RenderableType:
    span = extent.y_high - extent.y_low
    step = 10.0 ** math.floor(math.log10(span / 10)) if span > 0 else 1.0
    labels = {0: extent.y_high, len(lines) // 2: (extent.y_high + extent.y_low) / 2, len(lines) - 1: extent.y_low}
    rows = [Text(""), Text.assemble(" " * _AXIS_WIDTH, title)]
    for place, line in enumerate(lines):
        label = tick_text(labels[place], step) if place in labels else ""
        rows.append(Text.assemble((label.rjust(_AXIS_WIDTH - 2) + (" ┤" if label else " │"), "dim"), line))
    axis = x_low + x_high.rjust(len(lines[0]) - len(x_low))
    rows.append(Text.assemble((" " * (_AXIS_WIDTH - 1) + "└" + "─" * len(lines[0]), "dim")))
    rows.append(Text(" " * _AXIS_WIDTH + axis, style="dim"))
    return Group(*(Text(row.plain, no_wrap=True, end="\n", spans=row.spans) for row in rows))


def _beside(parts: Sequence[RenderableType], wide: bool) -> RenderableType:
    if not wide:
        return Group(*parts)
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(*parts)
    return grid


def _runs_table(runs: Sequence[tuple[str, RunSummary]], unreadable: Sequence[str], now: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in ("step", "val. loss", "samples/s", "when"):
        table.add_column(title, justify="right", no_wrap=True)
    for folder, summary in runs:
        table.add_row(
            Text(printable(folder)),
            _state_text(summary.state),
            f"{summary.steps}/{summary.total_steps}",
            number(summary.last_validation_loss),
            number(summary.samples_per_s, 3),
            _ago(summary.latest, now),
        )
    for folder in unreadable:
        table.add_row(Text(printable(folder)), _state_text("unreadable"), "–", "–", "–", "–")
    return table


def _summary_table(summary: RunSummary) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    best = summary.best_validation_loss
    at = f"  (best {number(best)} at step {summary.best_validation_step:,})" if best is not None else ""
    lost = f", {summary.replayed_steps:,} replayed" if summary.replayed_steps else ""
    for label, value in (
        ("validation loss", f"{number(summary.first_validation_loss)} → {number(summary.last_validation_loss)}{at}"),
        ("training loss", f"{number(summary.training_loss)}  (mean of the last 20 steps)"),
        ("steps", f"{summary.steps:,} of {summary.total_steps:,}{lost}"),
        ("samples", f"{summary.samples:,} of {summary.total_samples:,}"),
        ("samples/s", f"{number(summary.samples_per_s)}  (median)"),
        ("wall time", duration(summary.wall_s)),
        (
            "attempts",
            f"{summary.attempts}  ({counted(summary.crashes, 'crash', 'crashes')}, {counted(summary.resizes, 'resize')})",
        ),
        ("goodput", goodput_words(summary)),
        ("checkpoints", f"{summary.checkpoints:,}"),
        ("world sizes", ", ".join(map(str, summary.world_sizes)) or "–"),
    ):
        table.add_row(label, Text(value))
    return table


def _seconds_table(summary: RunSummary) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("seconds of", style="dim")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    total = sum(summary.seconds.values())
    for name in SECONDS_CLASSES:
        share = summary.seconds[name] / total if total else 0.0
        bar = Text("█" * round(share * 24), style=_CLASS_STYLE[name])
        table.add_row(name, duration(summary.seconds[name]), f"{share:.0%}", bar)
    return table


def _cost_tables(cost: Cost) -> list[RenderableType]:
    words = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    words.add_column(style="dim", no_wrap=True)
    words.add_column(overflow="fold")
    for label, value in cost_rows(cost):
        words.add_row(label, Text(value, style="yellow" if label in ("without a price", "note") else ""))
    if not cost.total:
        return [words]
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("dollars spent", style="dim", no_wrap=True)
    table.add_column("", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for name, amount in cost.dollars.items():
        share = amount / cost.total
        table.add_row(DOING[name], dollars(amount), f"{share:.1%}", Text("█" * round(share * 24), _SPENT_STYLE[name]))
    return [words, table]


def _events_table(events: Sequence[Event]) -> RenderableType:
    """The newest, those of the routine left out first."""
    told = [event for event in events if event.kind not in ROUTINE] if len(events) > EVENTS_SHOWN else list(events)
    shown = told[-EVENTS_SHOWN:]
    left_out = len(events) - len(shown)
    title = f"{len(shown)} of {len(events)} events; the others are in the report" if left_out else None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=title, caption_justify="left")
    table.add_column("time", no_wrap=True, style="dim")
    table.add_column("step", justify="right")
    table.add_column("event", overflow="fold")
    for event in shown:
        when = datetime.fromtimestamp(event.time).strftime("%m-%d %H:%M:%S")
        message = Text(printable(event.message), style=_KIND_STYLE.get(event.kind, ""))
        table.add_row(when, "–" if event.step is None else f"{event.step:,}", message)
    return table if events else Padding(Text("no event has been told yet"), (1, 0))


def _state_text(state: str) -> Text:
    return Text(state, style=_STATE_STYLE[state])


def _ago(when: float | None, now: float) -> str:
    if when is None:
        return "–"
    sizes = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    unit, size = next(((unit, size) for unit, size in sizes if now - when >= 2 * size), ("s", 1))
    return "just now" if now - when < 5 else f"{int((now - when) // size)} {unit} ago"


def _folders_with(entries: Iterable[Entry], *names: str) -> list[str]:
    """Folders right below a store that hold one of the names: those of runs, whole or not, or of studies."""
    parts = [entry.name.split("/", 2) for entry in entries]
    return sorted({part[0] for part in parts if len(part) > 1 and part[1] in names})


def _scale(values: Floats, interval: tuple[float, ...], cells: int) -> Floats:
    """Where values lie on a line of `cells` cells, as fractions of a cell from 0 to cells - 1."""
    low, high = interval
    return (values - low) / (high - low) * (cells - 1)


def _print_json(document: object) -> None:
    print(json_format.dumps(without_nan(document), indent=1), flush=True)
