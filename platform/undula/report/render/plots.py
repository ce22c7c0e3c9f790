"""Plots of a run for the terminal, in braille characters."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from undula.report.data.curves import downsample, validation_curve
from undula.report.data.run_record import RecordedRun
from undula.report.data.summary import Floats, column, throughput
from undula.report.render.axes import tick_text
from undula.report.text import duration, number

PLOT_ROWS = 9
"""Height of a plot in lines."""
_LABEL_WIDTH = 7
"""Width of the labels of the y axis in characters."""
_AXIS_WIDTH = _LABEL_WIDTH + 2
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""Bits of the dots of a braille character; shape [rows, columns]."""
_BARS = " ▁▂▃▄▅▆▇█"


class PlotRange(NamedTuple):
    """Part of the plane that a plot shows."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float


def plot(
    xs: Sequence[float] | Floats,
    ys: Sequence[float] | Floats,
    width: int,
    height: int,
    shown: PlotRange | None = None,
) -> list[str]:
    """Draw a curve in braille characters, as `height` strings of `width` characters.

    Args:
        xs: Ascending positions.
        ys: Values. A value that is not finite leaves a gap; all others are joined in their order.
        width: Number of characters in a line.
        height: Number of lines.
        shown: Part of the plane to show; by default, the smallest one with all points.
    """
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    kept = downsample(y, 16 * width)
    x, y = x[kept], y[kept]
    dots = np.zeros((height * 4, width * 2), dtype=bool)
    shown = shown or range_of(x, y)
    column_of, row_of = _scale(x, shown[:2], width * 2), height * 4 - 1 - _scale(y, shown[2:], height * 4)
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
    """Draw values as one line of `width` bars. The largest value has full height; 0 and NaN are blank."""
    heights = np.asarray(values, dtype=np.float64)
    if not len(heights):
        return " " * width
    cells = heights[np.linspace(0, len(heights) - 1, width).round().astype(int)]
    top = float(np.nanmax(cells, initial=0.0)) or 1.0
    return "".join(_BARS[math.ceil(cell / top * 8)] if math.isfinite(cell) and cell > 0 else " " for cell in cells)


def range_of(x: Floats, y: Floats) -> PlotRange:
    """Return the smallest range that contains every finite point. Its sides are never 0."""
    finite = np.isfinite(x) & np.isfinite(y)
    if not finite.any():
        return PlotRange(0.0, 1.0, 0.0, 1.0)
    x_low, x_high, y_low, y_high = (
        float(v) for v in (x[finite].min(), x[finite].max(), y[finite].min(), y[finite].max())
    )
    pad = 0.0 if y_high > y_low else abs(y_high) * 0.1 or 1.0
    return PlotRange(x_low, x_high if x_high > x_low else x_low + 1.0, y_low - pad, y_high + pad)


def loss_plot(run: RecordedRun, width: int) -> RenderableType:
    """Draw the training loss over samples, with validations as dots; `width` is in characters."""
    steps = run.ledger.steps
    x, y = column(steps, "samples"), column(steps, "loss")
    points, point_y = validation_curve(run, 0.0)
    point_x = points.samples
    shown = range_of(np.concatenate([[0.0], x, point_x]), np.concatenate([y[:1], y, point_y]))
    inner = width - _AXIS_WIDTH
    lines = [Text(line, style="blue") for line in plot(x, y, inner, PLOT_ROWS, shown)]
    columns, rows = _scale(point_x, shown[:2], inner), PLOT_ROWS - 1 - _scale(point_y, shown[2:], PLOT_ROWS)
    for place in np.flatnonzero(np.isfinite(rows)).tolist():
        at = round(columns[place])
        line = lines[round(rows[place])]
        lines[round(rows[place])] = Text.assemble(line[:at], ("●", "bold yellow"), line[at + 1 :])
    title = Text.assemble(("loss", "bold"), " over samples   ", ("⠤⠤", "blue"), " training")
    if len(point_y):
        title.append_text(Text.assemble("  ", ("●", "bold yellow"), " validation"))
    return _framed(title, lines, shown, "0", f"{int(shown.x_high):,}")


def speed_plot(run: RecordedRun, width: int) -> RenderableType:
    """Draw samples per second over time, with the world size below. The latter is blank while no worker trained.

    Args:
        run: The run.
        width: Width in characters.
    """
    steps = run.ledger.steps
    inner = width - _AXIS_WIDTH
    began = min([event.time for event in run.events[:1]] + column(steps, "time")[:1].tolist())
    x, y, sizes = column(steps, "time") - began, throughput(steps), column(steps, "world_size")
    restarts = np.flatnonzero(np.diff(column(steps, "attempt"))) + 1
    whole = range_of(x, y)
    shown = PlotRange(0.0, max(whole.x_high, 1e-3), 0.0, whole.y_high)
    drawn = plot(np.insert(x, restarts, x[restarts]), np.insert(y, restarts, np.nan), inner, PLOT_ROWS - 2, shown)
    # Each bar stands for a slice of time, and shows the first step that was committed at or after its end.
    ends = np.arange(1, inner + 1) / inner * shown.x_high
    following = np.minimum(np.searchsorted(x, ends), len(x) - 1)
    began_at = x[following] - column(steps, "step_samples")[following] / y[following]
    is_idle = np.isin(following, restarts) & (began_at > ends)
    low, high = int(sizes.min()), int(sizes.max())
    ranks = f" ({low}–{high})" if low < high else f" ({high})"
    title = Text.assemble(("samples/s", "bold"), " and ", ("world size", "bold"), f"{ranks} over time")
    framed = _framed(title, [Text(line, style="green") for line in drawn], shown, "0 s", duration(shown.x_high))
    bars = (strip(np.where(is_idle, 0.0, sizes[following]), inner), "magenta")
    return Group(framed, Text.assemble(("ranks".rjust(_AXIS_WIDTH - 1) + " ", "dim"), bars))


def _framed(title: Text, lines: Sequence[Text], shown: PlotRange, x_low: str, x_high: str) -> RenderableType:
    """Return a plot with its title and axes."""
    labels = {0: shown.y_high, len(lines) // 2: (shown.y_high + shown.y_low) / 2, len(lines) - 1: shown.y_low}
    rows = [Text(""), Text.assemble(" " * _AXIS_WIDTH, title)]
    for place, line in enumerate(lines):
        label = _y_label(labels[place], shown.y_high - shown.y_low) if place in labels else ""
        rows.append(Text.assemble((label.rjust(_LABEL_WIDTH) + (" ┤" if label else " │"), "dim"), line))
    rows.append(Text.assemble((" " * (_AXIS_WIDTH - 1) + "└" + "─" * len(lines[0]), "dim")))
    rows.append(Text(" " * _AXIS_WIDTH + x_low + x_high.rjust(len(lines[0]) - len(x_low)), style="dim"))
    return Group(*(Text(row.plain, no_wrap=True, end="\n", spans=row.spans) for row in rows))


def _y_label(value: float, height: float) -> str:
    """Return the label of a value, with at most _LABEL_WIDTH characters, on a y axis that spans `height`."""
    step = 10.0 ** math.floor(math.log10(height / 10)) if height > 0 else 1.0
    texts = (tick_text(value, step), *(number(value, digits) for digits in (4, 3, 2, 1)))
    return next((text for text in texts if len(text) <= _LABEL_WIDTH), f"{value:.0e}")


def _scale(values: Floats, interval: tuple[float, ...], cells: int) -> Floats:
    """Return the positions of values on a line of `cells` cells, from 0 to cells - 1."""
    low, high = interval
    return (values - low) / (high - low) * (cells - 1)
