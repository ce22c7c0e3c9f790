"""Figures of learning rates: loss over rate, best rate over batch, predictions of the rules, and the map of losses and divergence."""

from collections.abc import Sequence
from math import inf, isfinite, log10, sqrt

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from undula.plan.rules import RULES, RuleName, powers
from undula.report.text import number
from undula.study.findings import GroupFindings, Tuning
from undula.study.fits import Floats, Optimum, PowerLaw
from undula.study.rates import AtBatch, RatePoint
from undula.study.render.drawing import (
    AXIS,
    BAND,
    DIVERGED,
    INK,
    PAPER,
    SOFT,
    NoFigure,
    batch_axis,
    batch_colors,
    legend_above,
    log_axis,
    new_axes,
    rule_dashes,
    rule_marker,
    spread,
)
from undula.study.spec import StudySpec
from undula.study.verdicts import interval_text

REACH = 8.0
"""Factor by which the plot of best rates extends beyond them, to show the lines of the rules."""
ROW = 0.024
"""Share of the height of a plot for the row of markers of one batch's diverged trials."""
PLOT_PT = 160.0
"""Approximate height of a plot in points; the width is larger."""
LEVELS = 14
"""Number of colours of the map of losses."""
SPAN = 300.0
"""Ratio of the largest difference of losses on the map to the smallest one with a separate colour."""


def draw_rates(found: GroupFindings, tuning: Tuning, spec: StudySpec) -> Figure:
    """Draw the last loss over the learning rate, with a line for each batch."""
    shown = [each for each in tuning.batches if each.points]
    losses = [point.loss for each in shown for point in each.points if isfinite(point.loss)]
    if not losses:
        raise NoFigure(_why_no_loss(shown))
    colors = batch_colors([each.batch for each in tuning.batches])
    figure, axes = new_axes()
    rates = [point.rate for each in shown for point in each.points]
    log_axis(axes.xaxis, min(rates), max(rates))
    rows_above = [each for each in shown if any(point.outcome == "diverged" for point in each.points)]
    top = _loss_axis(axes, losses, ROW * len(rows_above))
    for each in shown:
        _loss_line(axes, each, colors[each.batch], top)
        diverged = [point.rate for point in each.points if point.outcome == "diverged"]
        height = 1 - ROW * (rows_above.index(each) + 0.5) if diverged else 1.0
        place = axes.get_xaxis_transform()
        axes.plot(diverged, [height] * len(diverged), "x", color=colors[each.batch], ms=3.4, mew=1.1, transform=place)
    axes.set_xlabel("learning rate")
    axes.set_ylabel(spec.metric.replace("_", " "))
    keys = [Line2D([], [], color=colors[each.batch], marker="o", ms=3.2, label=f"{each.batch:,}") for each in shown]
    legend_above(figure, [*keys, *_marker_keys(shown, top)], columns=5, title="batch")
    return figure


def _loss_line(axes: Axes, each: AtBatch, color: str, top: float) -> None:
    complete = [point for point in each.points if isfinite(point.loss)]
    axes.plot([point.rate for point in complete], [point.loss for point in complete], "-o", color=color, ms=3.2, lw=1.3)
    for point in complete:
        if point.deviation:
            low, high = point.loss - point.deviation, point.loss + point.deviation
            axes.plot(
                [point.rate] * 2, [max(low, 1e-300) if axes.get_yscale() == "log" else low, high], color=color, lw=0.9
            )
    for point in each.points:
        if point.outcome == "stopped":
            marker, seen = ("o", _last_seen(point)) if _last_seen(point) <= top else ("^", top)
            axes.plot([point.rate], [seen], marker, mfc=PAPER, mec=color, ms=3.6, mew=1.0)
    if each.optimum:
        _optimum(axes, each.optimum, color)


def _last_seen(point: RatePoint) -> float:
    """Return the mean loss at which the trials of a point were stopped, or infinity if none was stopped."""
    seen = [record.loss for record in point.records if record.state == "stopped"]
    return sum(seen) / len(seen) if seen else inf


def _marker_keys(shown: Sequence[AtBatch], top: float) -> list[Line2D]:
    """Return the legend entries of the markers in the figure."""
    outcomes = {point.outcome for each in shown for point in each.points}
    optima = [each.optimum for each in shown if each.optimum]
    keys = []
    if any(each.interior for each in optima):
        keys.append(_key("best", "*", INK, 8))
    if any(not each.interior for each in optima):
        keys.append(_key("a bound", "D", INK, 5, hollow=True))
    stopped = [_last_seen(point) for each in shown for point in each.points if point.outcome == "stopped"]
    if any(seen <= top for seen in stopped):
        keys.append(_key("stopped", "o", SOFT, 4, hollow=True))
    if any(seen > top for seen in stopped):
        keys.append(_key("stopped, higher", "^", SOFT, 4, hollow=True))
    if "diverged" in outcomes:
        keys.append(_key("diverged", "x", SOFT, 4))
    return keys


def _key(label: str, marker: str, color: str, size: float, hollow: bool = False) -> Line2D:
    return Line2D(
        [], [], ls="", marker=marker, color=color, mfc=PAPER if hollow else color, mew=1.1, ms=size, label=label
    )


def _optimum(axes: Axes, optimum: Optimum, color: str) -> None:
    if optimum.interior:
        axes.plot([optimum.rate], [optimum.loss], "*", color=color, mec=PAPER, mew=0.6, ms=11, zorder=5, clip_on=False)
    else:
        axes.plot([optimum.rate], [optimum.loss], "D", color=color, mfc=PAPER, mew=1.4, ms=5.5, zorder=5, clip_on=False)


def _loss_axis(axes: Axes, losses: Sequence[float], above: float) -> float:
    """Scale the axis, logarithmically if the losses are positive and far apart, and return the highest loss that is shown.

    Args:
        axes: The plot.
        losses: The losses to show.
        above: Share of the height to leave free above the losses.
    """
    low, high = min(losses), max(losses)
    above = min(above, 0.4)
    if low > 0 and high / low > 3:
        log_axis(axes.yaxis, low, high * (high / low) ** (above / (1 - above)), pad=0.06)
        return high
    # A few losses far above all others would flatten the valleys.
    usual = float(np.quantile(losses, 0.9))
    high = min(high, usual + 2 * (usual - low)) if usual > low else high
    room = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    bottom, top = low - room, high + room
    axes.set_ylim(bottom, bottom + (top - bottom) / (1 - above))
    return high


def draw_best_rate(found: GroupFindings, base: int) -> Figure:
    """Draw the best learning rate over the batch, the fitted power law with its interval, and a line for each rule."""
    optima = [(each, each.optimum) for each in found.main.batches if each.optimum]
    batches = [each.batch for each in found.main.batches]
    if not optima:
        raise NoFigure(_why_no_loss(found.main.batches))
    if len(batches) < 2:
        raise NoFigure(found.main.problem)
    figure, axes = new_axes()
    batch_axis(axes, batches)
    colors = batch_colors(batches)
    law = found.main.laws[0] if found.main.laws else None
    rates = [optimum.rate for _, optimum in optima]
    rates += [each.optimum.rate for tuning in found.others for each in tuning.batches if each.optimum]
    fitted = [law.fit.factor * batch**law.fit.exponent for batch in batches] if law else []
    at_base = next((optimum for each, optimum in optima if each.batch == base), None)
    low, high = min([*rates, *fitted]), max([*rates, *fitted])
    if at_base and at_base.interior:  # makes room for the lines of the rules, up to REACH
        kappas = [min(batches) / base, max(batches) / base]
        ends = [at_base.rate * RULES[rule].factor(kappa) for rule in _rules_with_lines(found) for kappa in kappas]
        low, high = (
            min([low, *(max(end, low / REACH) for end in ends)]),
            max([high, *(min(end, high * REACH) for end in ends)]),
        )
    middle, half = (
        sqrt(low * high),
        max(sqrt(high / low), 2.0),
    )  # the height must not be 0 if all rates are equal
    log_axis(axes.yaxis, middle / half, middle * half, pad=0.08)
    axes.set_ylabel("best learning rate")
    keys = [_fit_line(axes, law.fit, batches)] if law else []
    for each, optimum in optima:
        seeds = each.rates_by_seed()
        if len(seeds) > 1 and optimum.interior:
            axes.plot(
                [each.batch] * 2,
                [min(seeds), max(seeds)],
                color=colors[each.batch],
                lw=3,
                alpha=0.35,
                solid_capstyle="butt",
            )
        marker, face = ("o", colors[each.batch]) if optimum.interior else ("D", PAPER)
        axes.plot([each.batch], [optimum.rate], marker, color=colors[each.batch], mfc=face, ms=6, mew=1.3, zorder=4)
    for tuning in found.others:
        rule = tuning.rules[0]
        shown = [each.optimum for each in tuning.batches if each.optimum and each.batch != base]
        axes.plot(
            [o.batch for o in shown],
            [o.rate for o in shown],
            rule_marker(rule),
            color=RULES[rule].mark.color,
            mfc=PAPER,
            ms=5,
            mew=1.2,
        )
        keys += [_key(f"best under {rule}", rule_marker(rule), RULES[rule].mark.color, 5, hollow=True)] if shown else []
    if any(not optimum.interior for _, optimum in optima):
        keys.append(_key("a bound", "D", INK, 5, hollow=True))
    if at_base and at_base.interior:
        _rule_lines(axes, at_base, batches, _rules_with_lines(found))
    legend_above(figure, keys, columns=2)
    return figure


def _rules_with_lines(found: GroupFindings) -> list[RuleName]:
    """Return the rules that scale with a power of the batch. Rules with the same power share a line."""
    verdicts = [each for law in found.main.laws[:1] for each in law.verdicts]
    return list(dict.fromkeys(each.rule for each in verdicts)) or list(powers())


def _fit_line(axes: Axes, fit: PowerLaw, batches: Sequence[int]) -> Line2D:
    x = np.geomspace(min(batches), max(batches), 60)
    if isfinite(fit.interval.high - fit.interval.low):
        line = fit.factor * x**fit.exponent
        below, above = _band(fit, x)
        axes.fill_between(x, line * np.exp(below), line * np.exp(above), color=BAND, lw=0, zorder=1)
        label = f"batch^{fit.exponent:.2f} (95 % {interval_text(fit.interval)})"
    else:
        label = f"batch^{fit.exponent:.2f} (no interval: two batches)"
    (drawn,) = axes.plot(x, fit.factor * x**fit.exponent, color=INK, lw=1.2, zorder=2, label=label)
    return drawn


def _band(fit: PowerLaw, x: Floats) -> tuple[Floats, Floats]:
    """Return the interval of the fit below and above its log rate. The level at the middle batch and the slope are independent."""
    away = np.log(x) - np.mean(np.log([each.batch for each in fit.used]))
    down, up = fit.exponent - fit.interval.low, fit.interval.high - fit.exponent
    above = np.hypot(fit.level, away * np.where(away > 0, up, down))
    below = np.hypot(fit.level, away * np.where(away > 0, down, up))
    return -below, above


def _rule_lines(axes: Axes, base: Optimum, batches: Sequence[int], rules: Sequence[RuleName]) -> None:
    """Draw the lines of the rules from the tuned rate of the base batch, with the name of each where its line leaves the plot."""
    x = np.geomspace(min(batches), max(batches), 200)
    bottom, top = axes.get_ylim()
    ends: dict[float, tuple[float, float, list[RuleName]]] = {}
    for rule in rules:
        y = base.rate * np.array([RULES[rule].factor(batch / base.batch) for batch in x])
        inside = (y >= bottom) & (y <= top)
        if not inside.any():
            continue
        power = round(float(np.log(y[-1] / y[0]) / np.log(x[-1] / x[0])), 6)
        if power in ends:
            ends[power][2].append(rule)
            continue
        axes.plot(x, y, color=RULES[rule].mark.color, ls=rule_dashes(rule), lw=1.3, zorder=2)
        last = int(np.flatnonzero(inside)[-1])
        ends[power] = (float(x[last]), float(y[last]), [rule])
    at_side = [each for each in ends.values() if each[0] >= x[-1] * 0.999]
    gap = 0.055 * log10(top / bottom)
    places = spread([log10(y) for _, y, _ in at_side], gap)
    for (_, _, names), place in zip(at_side, places, strict=True):
        _name(axes, names, (1.015, 10**place), axes.get_yaxis_transform(), "left", "center")
    for at, _, names in (each for each in ends.values() if each not in at_side):
        _name(axes, names, (at, 1.01), axes.get_xaxis_transform(), "center", "bottom")


def _name(axes: Axes, names: Sequence[RuleName], at: tuple[float, float], transform: object, ha: str, va: str) -> None:
    axes.text(*at, ", ".join(names), color=RULES[names[0]].mark.color, transform=transform, ha=ha, va=va, fontsize=7.5)


def draw_predicted(found: GroupFindings, base: int) -> Figure:
    """Draw the ratio of predicted to tuned rates over the batch. Rules predict rates from the tuned rate of the base batch."""
    rows = [(each.rule, each.batch, *each.ratio) for each in found.predictions if each.ratio]
    if not rows:
        at_base = next((each for each in found.main.batches if each.batch == base), None)
        raise NoFigure(
            f"rules predict from the base batch: {at_base.problem}"
            if at_base and at_base.problem
            else found.main.problem or "only the base batch has a tuned learning rate"
        )
    figure, axes = new_axes()
    batch_axis(axes, sorted({base, *(batch for _, batch, _, _ in rows)}))
    ratios = [ratio for *_, ratio in rows]
    log_axis(axes.yaxis, min([*ratios, 0.9]), max([*ratios, 1.1]), pad=0.1)
    axes.axhline(1, color=AXIS, lw=1.2, zorder=1)
    keys = []
    for rule in dict.fromkeys(rule for rule, *_ in rows):
        mine = [(batch, bound, ratio) for of, batch, bound, ratio in rows if of == rule]
        color, marker = RULES[rule].mark.color, rule_marker(rule)
        x, y = [base, *(batch for batch, _, _ in mine)], [1, *(ratio for *_, ratio in mine)]
        axes.plot(x, y, color=color, ls=rule_dashes(rule), lw=1.2)
        for batch, bound, ratio in mine:
            axes.plot([batch], [ratio], marker, color=color, mfc=PAPER if bound else color, mew=1.1, ms=5)
        keys.append(Line2D([], [], color=color, ls=rule_dashes(rule), marker=marker, ms=5, label=rule))
    if any(bound for _, _, bound, _ in rows):
        keys.append(_key("a bound", "o", SOFT, 5, hollow=True))
    axes.set_ylabel("predicted over tuned learning rate")
    legend_above(figure, keys, columns=4)
    return figure


def draw_map(found: GroupFindings, tuning: Tuning) -> Figure:
    """Draw a map over batch and learning rate, with the loss above the lowest one of its batch, and with trials that have no loss."""
    points = [(each, point) for each in tuning.batches for point in each.points]
    if not points:
        raise NoFigure("no trial has started yet")
    figure, axes = new_axes()
    batch_axis(axes, [each.batch for each in tuning.batches])
    log_axis(axes.yaxis, min(point.rate for _, point in points), max(point.rate for _, point in points))
    size = _cell_size(tuning.batches)
    markers = {"diverged": ("X", DIVERGED), "failed": ("s", INK), "stopped": ("o", SOFT), "unfinished": ("s", AXIS)}
    excess = [point.loss - each.lowest.loss for each, point in points if each.lowest and isfinite(point.loss)]
    positive = [value for value in excess if value > 0]
    # The limit keeps two nearly equal losses from taking most of the colours.
    norm = LogNorm(max(min(positive), max(positive) / SPAN), max(positive) * 1.0001) if positive else None
    for each, point in points:
        if isfinite(point.loss) and each.lowest:
            over = point.loss - each.lowest.loss
            color = _level(max(float(norm(over)), 0.0) if norm and over > 0 else 0.0)
            axes.scatter([each.batch], [point.rate], s=size, marker="s", c=color, lw=0)
        else:
            marker, color = markers[point.outcome]
            face = color if point.outcome == "diverged" else PAPER
            axes.scatter([each.batch], [point.rate], s=size * 0.55, marker=marker, c=face, edgecolors=color, lw=0.9)
    for each in tuning.batches:
        if each.optimum:
            axes.plot([each.batch], [each.optimum.rate], "*", color=PAPER, mec=INK, mew=0.7, ms=7, zorder=5)
    axes.set_ylabel("learning rate")
    names = [outcome for outcome in markers if any(point.outcome == outcome for _, point in points)]
    keys: list[Line2D | Patch] = [
        _key(name, markers[name][0], markers[name][1], 5, hollow=name != "diverged") for name in names
    ]
    if any(each.optimum for each in tuning.batches):
        keys.append(Line2D([], [], ls="", marker="*", color=PAPER, mec=INK, mew=0.7, ms=7, label="best"))
    if norm and norm.vmin is not None and norm.vmax is not None:
        for share in (0.0, 0.5, 1.0):
            value = norm.vmin ** (1 - share) * norm.vmax**share
            keys.append(Patch(color=_level(share), label=f"+{number(value, 2)}"))
    legend_above(figure, keys, columns=5, title="loss over the lowest of its batch" if norm else None)
    return figure


def _level(share: float) -> str:
    """Return the colour of the map at a share of its range. The lowest loss has share 0 and a bright colour."""
    stepped = round(share * (LEVELS - 1)) / (LEVELS - 1)
    return to_hex(matplotlib.colormaps["cividis"](0.95 - 0.85 * stepped))


def _cell_size(batches: Sequence[AtBatch]) -> float:
    """Return the area of a marker in square points, chosen so that markers overlap little within a column and between columns."""
    rates = [np.log([point.rate for point in each.points]) for each in batches if each.points]
    span = max(each.max() for each in rates) - min(each.min() for each in rates)
    gaps = np.concatenate([np.diff(each) for each in rates])
    # Nearly equal rates may overlap.
    gap = float(np.quantile(gaps, 0.25)) if len(gaps) else span
    side = PLOT_PT * min(gap / span if span else 1.0, 1 / max(len(batches), 1))
    return float(np.clip(side, 4, 11)) ** 2


def _why_no_loss(batches: Sequence[AtBatch]) -> str:
    outcomes = {point.outcome for each in batches for point in each.points}
    if outcomes == {"diverged"}:
        return "every learning rate diverged at every batch; lower rates are needed"
    return "no trial is complete" if outcomes else "no trial has started yet"
