"""Text of reports: numbers, durations, sums of money, and untrusted text. Pure."""

import math
from collections.abc import Mapping

DASH = "–"
"""Text in place of a figure that does not exist."""


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with `digits` significant digits, or a dash for None."""
    if value is None:
        return DASH
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(power)}"
    return f"{value:,.{max(digits - 1 - math.floor(math.log10(abs(value))), 0)}f}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, such as `1 crash` or `2 crashes`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """Return a duration in readable units, such as `0.4 s`, `12 s`, `5 min 03 s`, `2 h 05 min` or `3 d 4 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def dollars(amount: float) -> str:
    """Return an amount of US dollars, such as `$1,234.50`, `$0.0431` or `$2.1e-5`."""
    return f"${amount:,.2f}" if amount >= 1 else f"${number(amount, 3)}"


def goodput_text(rank_seconds: Mapping[str, float]) -> str:
    """Return the goodput in one line, such as `93.0% of 1 h 20 min of rank time; restarting 4.0%, data 3.0%`.

    Args:
        rank_seconds: rank-seconds by class.
    """
    held_s = sum(rank_seconds.values())
    if not held_s:
        return DASH
    losses = sorted((seconds, name) for name, seconds in rank_seconds.items() if name != "useful")
    parts = [f"{name} {seconds / held_s:.1%}" for seconds, name in reversed(losses) if seconds / held_s >= 0.0005]
    rest = f"; {', '.join(parts)}" if parts else ""
    return f"{rank_seconds['useful'] / held_s:.1%} of {duration(held_s)} of rank time{rest}"


def printable(text: str, limit: int = 400) -> str:
    """Return the text without control characters and with at most `limit` characters, so that it can neither control a terminal nor
    flood a page.
    """
    clean = "".join(char if char.isprintable() else " " for char in text)
    return clean if len(clean) <= limit else f"{clean[: limit - 1]}…"
