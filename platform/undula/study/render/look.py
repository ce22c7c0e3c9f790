"""Look that the figures of a study share: colours, the axis of batches, and the entries of legends."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log10

import numpy as np

from undula.plan.rules import RULES, RuleName
from undula.report.render.axes import Axis
from undula.report.render.chart import Glyph, Key
from undula.study.fits import ParetoFit
from undula.study.verdicts import critical_batch_text, interval_text, is_bounded

VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
CIVIDIS = ("#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838")
"""Perceptually uniform colour maps of matplotlib, at equal distances."""
LEVELS = 14
"""Number of colours of the map of losses."""
PLOT_PX = 290
"""Width and least height of a plot on a narrow page in pixels, in which the labels of batches must not touch."""
DASHED, DOTTED = "6 3", "1.5 3"


class NoFigure(Exception):
    """Reason why a figure cannot be drawn, without a capital letter and full stop."""


def colors(batches: Sequence[int], warmups: int) -> Mapping[str, tuple[str, str]]:
    """Return the colours of the figures on a light and on a dark page, by CSS class.

    Args:
        batches: All batches of the study.
        warmups: Number of warmups of the study.
    """
    low, high = min(batches), max(batches)
    shares = {batch_css(batch): log10(batch / low) / log10(high / low) if high > low else 0.0 for batch in batches}
    shares |= {warmup_css(place): log10(place + 1) / log10(warmups + 1) for place in range(warmups)}
    # A light page lacks the lightest end of the map, and a dark page the darkest.
    scales = {css: (_mixed(VIRIDIS, 0.84 * share), _mixed(VIRIDIS, 0.3 + 0.7 * share)) for css, share in shares.items()}
    levels = {level_css(level / (LEVELS - 1)): level / (LEVELS - 1) for level in range(LEVELS)}
    return {
        **scales,
        **{rule_css(name): (rule.mark.color, rule.mark.dark) for name, rule in RULES.items()},
        **{css: (_mixed(CIVIDIS, 0.95 - 0.85 * share),) * 2 for css, share in levels.items()},
    }


def _mixed(scale: Sequence[str], share: float) -> str:
    """Return the colour at a share of a scale from 0 to 1."""
    parts = np.array([[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in scale])
    mixed = [np.interp(share * (len(scale) - 1), range(len(scale)), channel) for channel in parts.T]
    return "#" + "".join(f"{round(value):02x}" for value in mixed)


def batch_css(batch: int) -> str:
    return f"b-{batch}"


def warmup_css(place: int) -> str:
    return f"w-{place}"


def rule_css(rule: RuleName) -> str:
    return f"rule-{list(RULES).index(rule)}"


def level_css(share: float) -> str:
    """Return the class of a share of the range of losses. The lowest loss has share 0 and a bright colour."""
    return f"level-{round(share * (LEVELS - 1))}"


def batch_axis(batches: Sequence[int]) -> Axis:
    """Return a logarithmic axis of batches, with a tick for each batch, and labels if there is room for them."""
    ordered = sorted(set(batches))
    pad = (ordered[-1] / ordered[0]) ** 0.06 if len(ordered) > 1 else 1.5
    low, high = ordered[0] / pad, ordered[-1] * pad
    px_a_decade = PLOT_PX / log10(high / low)
    every = next(every for every in range(1, len(ordered) + 1) if _have_room(ordered[::every], px_a_decade))
    ticks = tuple((float(batch), "" if place % every else f"{batch:,}") for place, batch in enumerate(ordered))
    return Axis(low, high, ticks, "batch (samples per step)", is_log=True)


def _have_room(batches: Sequence[int], px_a_decade: float) -> bool:
    ends = [(log10(batch) * px_a_decade, 3.7 * len(f"{batch:,}") + 2) for batch in batches]
    return all(left + half <= right - other for (left, half), (right, other) in pairwise(ends))


def rule_key(label: str, rule: RuleName, glyph: Glyph | None = None) -> Key:
    """Return the legend entry of the line of a rule."""
    return Key(label, f"thin {rule_css(rule)}", glyph, is_line=True, dash=RULES[rule].mark.dash)


def critical_key(fit: ParetoFit, has_interval: bool = True) -> Key:
    """Return the legend entry of the dotted line at the critical batch, or of its band if there is no line."""
    label = f"critical batch {critical_batch_text(fit)}"
    if not is_bounded(fit):
        return Key(label, "band", "patch")
    interval = f" ({interval_text(fit.interval, 0)})" if has_interval else ""
    return Key(label + interval, "thin ink", is_line=True, dash=DOTTED)
