"""Charts as SVG, for pages and for files. Pure.

On a page, a plot stretches with its width. Only curves and bands use coordinates that stretch; everything else is placed in percent, so
that text, points and lines keep their size. Colours are classes of the style sheet, so that they follow the scheme of the page.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal, Protocol

import numpy as np
from markupsafe import Markup

from undula.report.data.summary import Floats
from undula.report.render.axes import Axis

Glyph = Literal[
    "dot", "circle", "square", "up", "down", "diamond", "plus", "cross", "pentagon", "star", "x", "cell", "patch"
]
GLYPHS: Mapping[Glyph, str] = {
    "dot": "M-1.9 0a1.9 1.9 0 1 0 3.8 0a1.9 1.9 0 1 0-3.8 0Z",
    "circle": "M-3.7 0a3.7 3.7 0 1 0 7.4 0a3.7 3.7 0 1 0-7.4 0Z",
    "square": "M-3.3-3.3H3.3V3.3H-3.3Z",
    "up": "M0-4.2L4 3H-4Z",
    "down": "M0 4.2L4-3H-4Z",
    "diamond": "M0-4.6L4.6 0L0 4.6L-4.6 0Z",
    "plus": "M-1.4-4H1.4V-1.4H4V1.4H1.4V4H-1.4V1.4H-4V-1.4H-1.4Z",
    "cross": "M0-1.9L1.9-3.8L3.8-1.9L1.9 0L3.8 1.9L1.9 3.8L0 1.9L-1.9 3.8L-3.8 1.9L-1.9 0L-3.8-1.9L-1.9-3.8Z",
    "pentagon": "M0-4L3.8-1.2L2.4 3.2H-2.4L-3.8-1.2Z",
    "star": "M0-6L1.6-2.1L5.7-1.9L2.5.8L3.5 4.9L0 2.6L-3.5 4.9L-2.5.8L-5.7-1.9L-1.6-2.1Z",
    "x": "M-2.4-2.4L2.4 2.4M-2.4 2.4L2.4-2.4",
    "cell": "M-6-2H6V2H-6Z",
    "patch": "M-6-5H6V5H-6Z",
}
"""Paths of the shapes of points, about the origin."""
STRETCHED = (10_000.0, 1_000.0)
"""Width and height of a plot on a page in its own coordinates."""


class Layer(Protocol):
    """Part of a plot."""

    def svg(self, x: Axis, y: Axis, size: tuple[float, float]) -> Markup:
        """Return the layer as SVG; `size` is that of the plot in the coordinates of curves."""


@dataclass(frozen=True)
class Line:
    """Curve through points. A value that is not finite leaves a gap."""

    x: Floats
    y: Floats
    css: str
    dash: str = ""
    """Lengths of dashes and gaps in pixels; empty for a solid line."""
    is_stepped: bool = False

    def svg(self, x: Axis, y: Axis, size: tuple[float, float]) -> Markup:
        # A value beyond the axis leaves the plot a little, and does not cover what is above it.
        points = _places(x.share(self.x), np.clip(1 - y.share(self.y), -0.03, 1.03), size)
        step, parts, is_joined = "V{1}H{0}" if self.is_stepped else "L{0} {1}", [], False
        for place in points:
            if place:
                parts.append((step if is_joined else "M{0} {1}h0").format(*place))
            is_joined = bool(place)
        dash = Markup(' stroke-dasharray="{}"').format(self.dash) if self.dash else ""
        path = Markup('<path class="curve {}" data-points="{}"{} d="{}"/>')
        return _in_plot(path.format(self.css, len(parts), dash, "".join(parts)), size)


@dataclass(frozen=True)
class Band:
    """Area between two curves."""

    x: Floats
    low: Floats
    high: Floats
    css: str = "band"

    def svg(self, x: Axis, y: Axis, size: tuple[float, float]) -> Markup:
        xs, ys = np.append(self.x, self.x[::-1]), np.append(self.low, self.high[::-1])
        corners = _places(np.clip(x.share(xs), 0, 1), np.clip(1 - y.share(ys), 0, 1), size)
        d = "L".join(" ".join(corner) for corner in corners if corner)
        return _in_plot(Markup('<path class="{}" d="M{}Z"/>').format(self.css, d), size)


@dataclass(frozen=True)
class Points:
    """Points of one shape. A point beyond the axes is left out."""

    x: Iterable[float]
    y: Iterable[float]
    css: str
    glyph: Glyph = "circle"

    def svg(self, x: Axis, y: Axis, size: tuple[float, float]) -> Markup:
        xs, ys = x.share(np.array([*self.x], dtype=float)), y.share(np.array([*self.y], dtype=float))
        point = Markup('<use class="glyph {}" href="#{}" x="{}" y="{}"/>')
        return Markup("").join(
            point.format(self.css, self.glyph, percent(at), percent(1 - height))
            for at, height in zip(xs.tolist(), ys.tolist(), strict=True)
            if -0.01 <= at <= 1.01 and -0.01 <= height <= 1.01
        )


@dataclass(frozen=True)
class Text:
    """Label beside a point."""

    x: float
    y: float
    text: str
    dx: float
    dy: float
    anchor: Literal["start", "end"] = "start"

    def svg(self, x: Axis, y: Axis, size: tuple[float, float]) -> Markup:
        text = Markup('<text x="{}" y="{}" dx="{}" dy="{}" text-anchor="{}">{}</text>')
        place = percent(float(x.share(self.x))), percent(1 - float(y.share(self.y)))
        return text.format(*place, self.dx, self.dy, self.anchor, self.text)


@dataclass(frozen=True)
class Key:
    """Entry of a legend: a line, a point, or both."""

    label: str
    css: str
    glyph: Glyph | None = None
    is_line: bool = False
    dash: str = ""

    @property
    def swatch(self) -> Markup:
        """Picture of the entry, 18 pixels wide and 12 high."""
        dash = Markup(' stroke-dasharray="{}"').format(self.dash) if self.dash else ""
        line = Markup('<path class="curve {}"{} d="M0 6H18"/>').format(self.css, dash) if self.is_line else ""
        point = Markup('<use class="glyph {}" href="#{}" x="9" y="6"/>')
        return Markup(line) + (point.format(self.css, self.glyph) if self.glyph else "")


@dataclass(frozen=True)
class Chart:
    """Layers over two axes, from back to front, and a legend."""

    x: Axis
    y: Axis
    layers: Sequence[Layer]
    keys: Sequence[Key] = ()
    legend: str = ""
    """Title of the legend."""
    key: str = ""
    """Identifier of the chart on its page."""
    title: str = ""
    unit: str = ""
    note: str = ""
    """Remark beside the title."""
    height: Literal["tall", "middle", "low"] = "tall"
    is_small: bool = False
    """Whether the chart shares a row with others."""

    @property
    def x_ticks(self) -> list[tuple[str, str, str]]:
        """Distances from the left in percent, labels, and how the labels are anchored there."""
        shares = [(float(self.x.share(value)), label) for value, label in self.x.ticks]
        return [(percent(at), label, "start" if not at else "end" if at > 0.97 else "middle") for at, label in shares]

    @property
    def y_ticks(self) -> list[tuple[str, str]]:
        """Distances from the top in percent, and labels."""
        return [(percent(1 - float(self.y.share(value))), label) for value, label in self.y.ticks]

    def plot(self, size: tuple[float, float] = STRETCHED) -> Markup:
        """Return the layers and the lines of the grid; `size` is that of the plot in the coordinates of curves."""
        across = Markup('<line class="grid" x2="100%" y1="{0}" y2="{0}"/>')
        lines = [across.format(at) for at, _ in self.y_ticks]
        if self.x.label:
            up = Markup('<line class="grid" y2="100%" x1="{0}" x2="{0}"/>')
            lines += [up.format(at) for at, *_ in self.x_ticks]
        bands = [layer for layer in self.layers if isinstance(layer, Band)]
        others = [layer for layer in self.layers if not isinstance(layer, Band)]
        parts = (
            [layer.svg(self.x, self.y, size) for layer in bands],
            [other.svg(self.x, self.y, size) for other in others],
        )
        base = Markup('<line class="base" x2="100%" y1="100%" y2="100%"/>')
        return Markup("\n").join([*parts[0], *lines, base, *parts[1]])


def glyph_definitions() -> Markup:
    """Return the shapes of all points, once for each page or file."""
    shape = Markup('<path id="{}" d="{}"/>')
    return Markup("<defs>{}</defs>").format(Markup("").join(shape.format(*glyph) for glyph in GLYPHS.items()))


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _places(x: Floats, y: Floats, size: tuple[float, float]) -> Iterator[tuple[str, str] | None]:
    """Yield shares of a plot in the coordinates of curves, or None for those that are not finite."""
    digits = 0 if size == STRETCHED else 2
    for px, py in zip((size[0] * x).tolist(), (size[1] * y).tolist(), strict=True):
        yield (f"{px:.{digits}f}", f"{py:.{digits}f}") if isfinite(px) and isfinite(py) else None


def _in_plot(shape: Markup, size: tuple[float, float]) -> Markup:
    box = Markup(
        '<svg width="100%" height="100%" viewBox="0 0 {:.0f} {:.0f}" preserveAspectRatio="none" overflow="visible">{}</svg>'
    )
    return box.format(*size, shape)
