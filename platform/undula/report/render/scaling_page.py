"""Page of `undula bench scaling`: throughput and speedup over the workers, where a step's time goes, and the measurements as tables."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from undula.plan.scaling import CONFIDENCE
from undula.report.data.sameness import Sameness
from undula.report.data.scaling import Fit, Scaling, Size, Throughput
from undula.report.data.summary import Floats
from undula.report.render.axes import Axis, log_axis
from undula.report.render.chart import Band, Chart, Key, Layer, Line, Points
from undula.report.render.html import SHARED_PACKAGE, Share, Tile, colors_css, render_page, shares_of
from undula.report.render.scaling_text import fit_sentence, seconds_table, sentences, throughput_table, title
from undula.report.text import counted, number, printable

COLORS = {"o-own": ("#1f5fae", "#6ea8ec"), "o-other": ("#b8500f", "#f2a35e")}
"""Colours of the job and of the other training on a light and on a dark page."""
DASHED = "6 3"
STYLE = ".interval { fill: var(--axis); fill-opacity: 0.45; stroke: none; } "
CURVE_POINTS = 60
BEYOND = 4
"""Multiple of the largest size up to which the speedup of the fit is shown."""


def render_scaling(report: Scaling, same: Sameness | None, against: str | None) -> str:
    """Return the page as HTML.

    Args:
        report: The measurements.
        same: Whether the runs are the same training; None if that cannot be expected.
        against: Command of the other training; None for none.
    """
    name = printable(report.name)
    context = {
        "name": f"Scaling of {name}",
        "state": "",
        "facts": [title(report)],
        "tiles": list(_tiles(report, same)),
        "charts": [throughput_chart(report), speedup_chart(report)],
        "bars": [(_label(size), _shares(size)) for size in report.sizes],
        "tables": [throughput_table(report), seconds_table(report)],
        "sentences": list(sentences(report, same, against)),
    }
    return render_page("scaling.html", context, package=SHARED_PACKAGE, more_style=STYLE + colors_css(COLORS))


def _tiles(report: Scaling, same: Sameness | None) -> Iterator[Tile]:
    counted_sizes = [size for size in report.sizes if not size.is_oversubscribed]
    if counted_sizes:
        largest = counted_sizes[-1]
        on = counted(largest.workers, "worker")
        yield Tile("samples/s", number(largest.throughput.median), f"on {on}")
        yield Tile("efficiency", f"{largest.efficiency:.0%}", f"on {on}")
    if report.fit:
        share = report.fit.share
        yield Tile(
            "serial share", f"{1 - share.value:.1%}", f"{1 - share.high:.1%} to {1 - share.low:.1%}, {report.fit.law}"
        )
    if same:
        text = "identical" if same.identical else "different" if same.difference else "within rounding"
        yield Tile("losses", text, "on each number of workers")


def _label(size: Size) -> str:
    crowded = ", oversubscribed" if size.is_oversubscribed else ""
    return f"{counted(size.workers, 'worker')}, {number(1e3 * sum(size.seconds.values()))} ms a step{crowded}"


def _shares(size: Size) -> tuple[Share, ...]:
    return shares_of(size.seconds, "c-", {}, lambda seconds: f"{number(1e3 * seconds, 3)} ms")


def workers_axis(low: int, high: int, sizes: Sequence[int]) -> Axis:
    """Return a logarithmic axis of numbers of workers with ticks at the measured sizes and at powers of two beyond them."""
    room = (high / low) ** 0.06 if high > low else 1.5
    beyond = [size for power in range(24) if max(sizes) < (size := 2**power) <= high]
    marks = sorted({*sizes, *beyond})
    labelled = [marks[0]]
    for _, mark in pairwise(marks):
        if np.log(mark / labelled[-1]) / np.log(high / low) >= 0.06:  # labels must not touch
            labelled.append(mark)
    ticks = tuple((float(mark), f"{mark:,}" if mark in labelled else "") for mark in marks)
    return Axis(low / room, high * room, ticks, "workers", is_log=True)


def throughput_chart(report: Scaling) -> Chart:
    """Draw the throughput over the workers, with the ideal line, the fit with its interval, and the other training."""
    sizes = [size.workers for size in report.sizes]
    first, one = report.sizes[0], report.sizes[0].throughput.median / report.sizes[0].workers
    x = _between(min(sizes), max(sizes))
    rates = [rate for size in report.sizes for rate in (size.throughput, size.baseline) if rate]
    ends = [end for rate in rates for end in (rate.low, rate.high)]
    layers, keys = _laws(report.fit, x, {of: report.fit.one[of] for of in _ENDS} if report.fit else None)
    layers.append(Line(x, one * x, "thin soft", DASHED))
    keys.insert(0, Key("ideal", "thin soft", is_line=True, dash=DASHED))
    layers += _measurements([(size, size.throughput) for size in report.sizes], "o-own", "circle")
    layers += _measurements([(size, size.baseline) for size in report.sizes if size.baseline], "o-other", "square")
    keys.append(Key("measured", "o-own", "circle"))
    keys += [Key("oversubscribed", "o-own hollow", "circle")] if any(s.is_oversubscribed for s in report.sizes) else []
    keys += [Key("other training", "o-other", "square")] if any(size.baseline for size in report.sizes) else []
    y = log_axis(min(*ends, one * first.workers), max(*ends, one * max(sizes)), "samples/s")
    return Chart(workers_axis(min(sizes), max(sizes), sizes), y, layers, keys, key="throughput", title="Throughput")


def speedup_chart(report: Scaling) -> Chart:
    """Draw the speedup over the workers, with the ideal line and what the fit expects of more workers."""
    sizes = [size.workers for size in report.sizes]
    low, high = min(sizes), max(sizes) * (BEYOND if report.fit else 1)
    first = report.sizes[0].throughput.median / low
    x = _between(low, high)
    layers, keys = _laws(report.fit, x, {of: report.fit.one[of] / first for of in _ENDS} if report.fit else None)
    layers.append(Line(x, x, "thin soft", DASHED))
    keys.insert(0, Key("ideal", "thin soft", is_line=True, dash=DASHED))
    relative = [
        (
            size,
            Throughput(*(rate / first for rate in (size.throughput.median, size.throughput.low, size.throughput.high))),
        )
        for size in report.sizes
    ]
    layers += _measurements(relative, "o-own", "circle")
    keys.append(Key("measured", "o-own", "circle"))
    ends = [end for _, rate in relative for end in (rate.low, rate.high)]
    y = log_axis(min(*ends, low), max(*ends, high), "speedup over one worker")
    note = fit_sentence(report.fit).partition(" (")[0] if report.fit else ""
    return Chart(workers_axis(low, high, sizes), y, layers, keys, key="speedup", title="Speedup", note=note)


_ENDS: tuple[Literal["value", "low", "high"], ...] = ("value", "low", "high")


def _between(low: float, high: float) -> Floats:
    return np.geomspace(low, high if high > low else low * 1.01, CURVE_POINTS)


def _laws(fit: Fit | None, x: Floats, one: dict[str, float] | None) -> tuple[list[Layer], list[Key]]:
    """Return the curve of a fit and the band of its interval, with their entries in the legend.

    Args:
        fit: The fit; None for none.
        x: Numbers of workers.
        one: Value of the curve for one worker, at the fitted share and both ends of its interval.
    """
    if fit is None or one is None:
        return [], []
    value, low, high = (np.array([one[of] * fit.speedup(each, of) for each in x]) for of in _ENDS)
    layers: list[Layer] = [
        Band(x, np.minimum(low, high), np.maximum(low, high), "interval"),
        Line(x, value, "thin ink"),
    ]
    return layers, [
        Key(f"{fit.law}'s law", "thin ink", is_line=True),
        Key(f"{CONFIDENCE:.0%} interval", "interval", "patch"),
    ]


def _measurements(
    rates: Sequence[tuple[Size, Throughput]], css: str, glyph: Literal["circle", "square"]
) -> Iterator[Layer]:
    """Yield the measurements of sizes with their ranges. An oversubscribed size is hollow."""
    for size, rate in rates:
        yield Line(np.full(2, float(size.workers)), np.array([rate.low, rate.high]), f"wide-bar {css}")
        yield Points([size.workers], [rate.median], f"{css}{' hollow' if size.is_oversubscribed else ''}", glyph)
