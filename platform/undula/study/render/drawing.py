"""Style of a study's figures, scales with readable ticks, and conversion to SVG and PNG.

Figures use matplotlib's objects without the global state of pyplot. Every colour has a counterpart for a dark page.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from undula.plan.rules import RULES, RuleName
from undula.report.render.ticks import nice_step, ticks

WIDTH_IN, HEIGHT_IN, DPI = 4.6, 3.45, 220
INK, SOFT, GRID, AXIS, PAPER, BAND = "#1a2029", "#566170", "#e3e7ec", "#b6bec8", "#ffffff", "#eceff3"
DIVERGED = "#c22a2a"
MARKERS = {
    "circle": "o",
    "square": "s",
    "up": "^",
    "down": "v",
    "diamond": "D",
    "plus": "P",
    "cross": "X",
    "pentagon": "p",
}
"""Markers of matplotlib by the shapes of the rules' points."""
_DARK: Mapping[str, str] = {
    INK: "#e4e8ed",
    SOFT: "#98a4b2",
    GRID: "#262d37",
    AXIS: "#4a5563",
    PAPER: "#171c23",
    BAND: "#212832",
    DIVERGED: "#ff7b72",
    **{rule.mark.color: rule.mark.dark for rule in RULES.values()},
}
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    "font.size": 8,
    "axes.labelsize": 8.5,
    "axes.edgecolor": AXIS,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "text.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.labelcolor": INK,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.5,
    "legend.borderpad": 0.1,
    "legend.borderaxespad": 0.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "path.simplify": True,
}
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_DEFAULTS = {("fill-opacity", "1"), ("stroke-opacity", "1"), ("opacity", "1")}


class NoFigure(Exception):
    """Reason why a figure cannot be drawn, without a capital letter and full stop."""


@dataclass(frozen=True)
class Drawn:
    """Figure as files."""

    svg: str
    """SVG element with attributes instead of styles, for a file or a page."""
    png: bytes


def new_axes() -> tuple[Figure, Axes]:
    """Return a new figure with one plot. Call this inside `styled`."""
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


@contextmanager
def styled() -> Iterator[None]:
    """Apply the style of the figures during this block, and restore the settings of matplotlib after it."""
    with matplotlib.rc_context(STYLE):
        yield


def draw(figure: Figure, name: str, title: str) -> Drawn:
    """Convert a figure to files.

    Args:
        figure: The figure.
        name: Name of the figure. It makes the ids of the SVG differ from those of other figures on the page.
        title: Description of the figure for screen readers.
    """
    svg, png = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        figure.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    return Drawn(_plain_svg(svg.getvalue(), title), png.getvalue())


def batch_colors(batches: Sequence[int]) -> dict[int, str]:
    """Return the colour of each batch, from a perceptually uniform map over its logarithm without the lightest end."""
    return {batch: to_hex(matplotlib.colormaps["viridis"](0.84 * share)) for batch, share in _shares(batches)}


def dark_counterparts(batches: Sequence[int]) -> dict[str, str]:
    """Return the colours for a dark page by the colours of the figures. Those of batches use the same map without the darkest end."""
    colors = batch_colors(batches)
    there = {
        colors[batch]: to_hex(matplotlib.colormaps["viridis"](0.3 + 0.7 * share)) for batch, share in _shares(batches)
    }
    return {**_DARK, **there}


def rule_marker(rule: RuleName) -> str:
    """Return matplotlib's marker of a rule."""
    return MARKERS[RULES[rule].mark.shape]


def rule_dashes(rule: RuleName) -> tuple[float, tuple[float, ...]]:
    """Return the dashes of the line of a rule, as matplotlib's `linestyle`."""
    return 0, tuple(map(float, RULES[rule].mark.dash.split()))


def batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    """Make the x axis a logarithmic axis of batches, with a tick for each batch, and labels if there is room for them."""
    low, high = min(batches), max(batches)
    pad = (high / low) ** 0.06 if high > low else 1.5
    axes.set_xscale("log")
    axes.set_xlim(low / pad, high * pad)
    ordered = sorted(set(batches))
    _ticks(axes.xaxis, [float(each) for each in ordered], _thinned(ordered, 3.6 / max(log10(high / low), 0.1)))
    axes.set_xlabel("batch (samples per step)")


def log_axis(axis: Axis, low: float, high: float, pad: float = 0.06) -> None:
    """Make an axis logarithmic from `low` to `high`, with ticks at round numbers. `pad` is the margin as a share of the axis."""
    room = (high / low) ** pad if high > low else 2.0
    low, high = low / room, high * room
    axes = axis.axes
    if axis is axes.xaxis:
        axes.set_xscale("log")
        axes.set_xlim(low, high)
    else:
        axes.set_yscale("log")
        axes.set_ylim(low, high)
    places = log_ticks(low, high)
    _ticks(axis, places, [tick_label(place) for place in places])


def log_ticks(low: float, high: float) -> list[float]:
    """Return three to nine round numbers within the range, or fewer if it does not contain three."""
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    found: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        found = [float(f"{digit}e{power}") for power in decades for digit in digits]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= 3:
            return found[:: ceil(len(found) / 9)]
    return [tick for tick in ticks(low, high, nice_step(high - low, 5)) if tick > 0]


def tick_label(value: float) -> str:
    """Return the label of a tick, such as `0.002`, `5,000`, `20k` or `3M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / min(size, 1e3 if unit == 'k' else size):g}{unit}"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
    return text.replace("e-0", "e-")


def legend_above(figure: Figure, handles: Sequence[Any], columns: int = 4, title: str | None = None) -> None:
    """Place a legend above the plot, where it covers no data. Entries fill the rows first, unlike in matplotlib itself."""
    if handles:
        by_column = [handle for column in range(columns) for handle in handles[column::columns]]
        found = figure.legend(handles=by_column, loc="outside upper left", ncols=columns, title=title)
        found.get_title().set_fontsize(7.5)
        found._legend_box.align = "left"  # type: ignore[attr-defined]  # matplotlib has no public interface for it
        found.get_title().set_color(SOFT)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Return the positions, in the order of `places`, moved so that neighbours are at least `gap` apart."""
    order = sorted(range(len(places)), key=lambda at: places[at])
    moved = [places[at] for at in order]
    for _ in range(100):
        tight = [at for at, (low, high) in enumerate(pairwise(moved)) if high - low < gap - 1e-9]
        for at in tight:
            middle, half = (moved[at] + moved[at + 1]) / 2, gap / 2
            moved[at], moved[at + 1] = middle - half, middle + half
        if not tight:
            break
    found = [0.0] * len(places)
    for at, place in zip(order, moved, strict=True):
        found[at] = place
    return found


def _shares(batches: Sequence[int]) -> list[tuple[int, float]]:
    low, high = min(batches), max(batches)
    return [(batch, log10(batch / low) / log10(high / low) if high > low else 0.0) for batch in sorted(set(batches))]


def _ticks(axis: Axis, places: Sequence[float], labels: Sequence[str]) -> None:
    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_major_formatter(FixedFormatter(list(labels)))
    axis.set_minor_locator(NullLocator())


def _thinned(batches: Sequence[int], inches_a_decade: float) -> list[str]:
    """Return the labels of every n-th batch, with the smallest n for which labels do not touch. The other labels are empty."""
    for every in range(1, len(batches) + 1):
        shown = batches[::every]
        ends = [(log10(batch) * inches_a_decade, 0.033 * len(f"{batch:,}") + 0.02) for batch in shown]
        if all(left + half <= right - other for (left, half), (right, other) in pairwise(ends)):
            break
    return [f"{batch:,}" if place % every == 0 else "" for place, batch in enumerate(batches)]


def _plain_svg(raw: bytes, title: str) -> str:
    """Return the SVG of matplotlib without unused ids, and with attributes instead of styles, which the policy of the page forbids."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(raw)
    referred = {
        text.split("#")[1].rstrip(")")
        for each in root.iter()
        for text in each.attrib.values()
        if "#" in text and _is_link(text)
    }
    for parent in root.iter():
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for each in root.iter():
        for name, value in _declarations(each.attrib.pop("style", "")):
            each.set(name, value)
        if each.attrib.get("id") not in referred:
            each.attrib.pop("id", None)
        each.tail = None if not (each.tail or "").strip() else each.tail
        each.text = None if not (each.text or "").strip() else each.text
        if "d" in each.attrib:
            each.set("d", " ".join(each.attrib["d"].split()))
    # Matplotlib's style sheet sets the first two for all elements. Elements that differ have their own attributes.
    attributes = {"stroke-linejoin": "round", "stroke-linecap": "butt", "role": "img", "aria-label": title}
    for name, value in attributes.items():
        root.set(name, value)
    return ElementTree.tostring(root, encoding="unicode")


def _is_link(text: str) -> bool:
    return text.startswith(("#", "url(#")) and len(text) > 7


def _declarations(style: str) -> Iterator[tuple[str, str]]:
    """Yield a style as attributes. The shorthand `font` is split, because SVG has no such attribute."""
    for each in filter(None, (part.strip() for part in style.split(";"))):
        name, _, value = (part.strip() for part in each.partition(":"))
        if name == "font":
            size_at = next(at for at, part in enumerate(value.split()) if part.endswith("px"))
            yield "font-size", value.split()[size_at]
            yield "font-family", " ".join(value.split()[size_at + 1 :])
            if "bold" in value.split()[:size_at]:
                yield "font-weight", "bold"
        elif (name, value) not in _DEFAULTS:
            yield name, value
