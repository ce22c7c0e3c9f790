"""Axes of charts: their scale, and ticks at round values. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from undula.report.data.summary import Floats


@dataclass(frozen=True)
class Axis:
    """Axis of a chart."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    """Values and labels. A tick with an empty label only has a line."""
    label: str = ""
    """Name of the quantity, with its unit."""
    is_log: bool = False

    def share(self, values: Floats | float) -> Floats:
        """Return the positions of values on the axis: 0 is its lower end, and 1 its upper end."""
        scale = np.log if self.is_log else np.asarray
        low, high = float(scale(self.low)), float(scale(self.high))
        positions: Floats = (scale(values) - low) / (high - low)
        return positions

    def at(self, share: float) -> float:
        """Return the value at a position; the inverse of `share`."""
        if self.is_log:
            return float(self.low * (self.high / self.low) ** share)
        return self.low + share * (self.high - self.low)

    def inside(self, values: Floats) -> Floats:
        """Return the values with NaN in place of those beyond the ends, so that a curve ends at the border of the plot."""
        return np.where((values >= self.low) & (values <= self.high), values, np.nan)


def linear_axis(low: float, high: float, about: int = 5, label: str = "") -> Axis:
    """Return a linear axis with about `about` ticks."""
    return Axis(low, high, tuple(labelled_ticks(low, high, about)), label)


def log_axis(low: float, high: float, label: str = "", pad: float = 0.06) -> Axis:
    """Return a logarithmic axis from `low` to `high`. `pad` is the margin as a share of the axis."""
    room = (high / low) ** pad if high > low else 2.0
    low, high = low / room, high * room
    return Axis(low, high, tuple((tick, tick_label(tick)) for tick in log_ticks(low, high)), label, is_log=True)


def padded_axis(low: float, high: float, label: str = "", pad: float = 0.06) -> Axis:
    """Return a linear axis from `low` to `high` with a margin, which is a share of the axis."""
    room = (high - low) * pad or abs(high) * 0.05 or 1.0
    return linear_axis(low - room, high + room, 7, label)


def nice_step(span: float, about: int) -> float:
    """Return a distance between ticks that gives about `about` ticks in the span. It is 1, 2 or 5 times a power of ten."""
    raw = span / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)


def labelled_ticks(low: float, high: float, about: int) -> Iterator[tuple[float, str]]:
    """Yield about `about` ticks in a range with their labels, and at least two, without which an axis has no scale."""
    steps = (nice_step(high - low, about * times) for times in (1, 2, 4))
    step = next(step for step in steps if len(ticks(low, high, step)) > 1)
    yield from ((tick, tick_text(tick, step)) for tick in ticks(low, high, step))


def ticks(low: float, high: float, step: float) -> list[float]:
    """Return the multiples of `step` within [low, high]."""
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return three to nine round numbers within the range, or fewer if it does not contain three."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        numbers = [float(f"{digit}e{power}") for power in decades for digit in digits]
        inside = [number for number in numbers if low <= number <= high]
        if len(inside) >= 3:
            return inside[:: math.ceil(len(inside) / 9)]
    return [tick for tick in ticks(low, high, nice_step(high - low, 5)) if tick > 0]


def tick_text(value: float, step: float) -> str:
    """Return the label of a tick, with as many decimals as the distance `step` needs. Large numbers end with k, M or G."""
    if value == 0:
        return "0"
    if step < 1e-3:
        digits = max(math.floor(math.log10(abs(value))) - math.floor(math.log10(step)), 0)
        mantissa, _, power = f"{value:.{digits}e}".partition("e")
        return f"{mantissa}e{int(power)}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if step >= size / 10 and abs(value) >= size:
            return f"{value / size:.{max(-math.floor(math.log10(step / size) + 1e-9), 0)}f}{unit}"
    return f"{value:.{max(-math.floor(math.log10(step) + 1e-9), 0)}f}"


def tick_label(value: float) -> str:
    """Return the label of a tick of a logarithmic axis, such as `0.002`, `5,000`, `20k` or `3M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / min(size, 1e3 if unit == 'k' else size):g}{unit}"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
    return text.replace("e-0", "e-")
