"""Ticks of an axis at round values, and their labels. Pure."""

import math


def nice_step(span: float, about: int) -> float:
    """Return a distance between ticks that gives about `about` ticks in the span. It is 1, 2 or 5 times a power of ten."""
    raw = span / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)


def ticks(low: float, high: float, step: float) -> list[float]:
    """Return the multiples of `step` within [low, high]."""
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


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
