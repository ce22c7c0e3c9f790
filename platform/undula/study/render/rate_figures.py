"""Figures of learning rates: loss over rate, best rate over batch, predictions of the rules, and the map of losses and divergence."""

from collections.abc import Iterator, Sequence
from math import inf, isfinite, log, sqrt

import numpy as np

from undula.plan.rules import RULES, RuleName, powers
from undula.report.render.axes import Axis, log_axis, padded_axis
from undula.report.render.chart import Band, Chart, Glyph, Key, Layer, Line, Points
from undula.report.text import number
from undula.study.findings import GroupFindings, Tuning
from undula.study.fits import Floats, Optimum, PowerLaw
from undula.study.rates import AtBatch, Outcome, RatePoint
from undula.study.render.look import PLOT_PX, NoFigure, batch_axis, batch_css, level_css, rule_css, rule_key
from undula.study.spec import StudySpec
from undula.study.verdicts import interval_text

REACH = 8.0
"""Factor by which the plot of best rates extends beyond them, to show the lines of the rules."""
ROW = 0.024
"""Share of the height of a plot for the row of markers of one batch's diverged trials."""
SPAN = 300.0
"""Ratio of the largest difference of losses on the map to the smallest one with a separate colour."""
A_BOUND = Key("a bound", "hollow ink", "diamond")


def draw_rates(tuning: Tuning, spec: StudySpec) -> Chart:
    """Draw the last loss over the learning rate, with a line for each batch."""
    shown = [tuned for tuned in tuning.batches if tuned.points]
    losses = [point.loss for tuned in shown for point in tuned.points if isfinite(point.loss)]
    if not losses:
        raise NoFigure(_why_no_loss(shown))
    rates = [point.rate for tuned in shown for point in tuned.points]
    unstable = [tuned for tuned in shown if _with_outcome(tuned, "diverged")]
    y, top = _loss_axis(losses, ROW * len(unstable), spec.metric.replace("_", " "))
    layers: list[Layer] = [layer for tuned in shown for layer in _loss_curve(tuned, y, top)]
    for row, tuned in enumerate(unstable):
        diverged = [point.rate for point in _with_outcome(tuned, "diverged")]
        layers.append(Points(diverged, [y.at(1 - ROW * (row + 0.5))] * len(diverged), batch_css(tuned.batch), "x"))
    keys = [Key(f"{tuned.batch:,}", batch_css(tuned.batch), "dot", is_line=True) for tuned in shown]
    x = log_axis(min(rates), max(rates), "learning rate")
    return Chart(x, y, layers, [*keys, *_marker_keys(shown, top)], "batch")


def _with_outcome(tuned: AtBatch, outcome: Outcome) -> list[RatePoint]:
    return [point for point in tuned.points if point.outcome == outcome]


def _loss_curve(tuned: AtBatch, y: Axis, top: float) -> Iterator[Layer]:
    css, complete = batch_css(tuned.batch), [point for point in tuned.points if isfinite(point.loss)]
    rates, losses = np.array([point.rate for point in complete]), np.array([point.loss for point in complete])
    yield Line(rates, losses, css)
    yield Points(rates, losses, css, "dot")
    yield deviation_bars(rates, complete, y, css)
    for point in _with_outcome(tuned, "stopped"):
        is_shown = _last_seen(point) <= top
        height = _last_seen(point) if is_shown else top
        yield Points([point.rate], [height], f"{css} hollow", "circle" if is_shown else "up")
    if tuned.optimum:
        glyph, look = best_look(tuned.optimum, "star")
        yield Points([tuned.optimum.rate], [tuned.optimum.loss], css + look, glyph)


def deviation_bars(x: Floats, points: Sequence[RatePoint], y: Axis, css: str) -> Line:
    """Return bars of the standard deviation of losses over seeds, inside the plot."""
    ends = [(point.loss - (point.deviation or 0.0), point.loss + (point.deviation or 0.0), np.nan) for point in points]
    values = np.clip(np.array(ends).reshape(-1, 3), y.low, y.high)
    return Line(np.repeat(x, 3), values.ravel(), f"thin {css}")


def best_look(optimum: Optimum, glyph: Glyph) -> tuple[Glyph, str]:
    """Return the glyph of an optimum and its classes. An optimum that is only a bound is a hollow diamond."""
    return (glyph, "") if optimum.interior else ("diamond", " hollow")


def _last_seen(point: RatePoint) -> float:
    """Return the mean loss at which the trials of a point were stopped, or infinity if none was stopped."""
    seen = [record.loss for record in point.records if record.state == "stopped"]
    return sum(seen) / len(seen) if seen else inf


def _marker_keys(shown: Sequence[AtBatch], top: float) -> Iterator[Key]:
    """Yield the legend entries of the markers in the figure."""
    optima = [tuned.optimum for tuned in shown if tuned.optimum]
    if any(optimum.interior for optimum in optima):
        yield Key("best", "ink", "star")
    if any(not optimum.interior for optimum in optima):
        yield A_BOUND
    stopped = [_last_seen(point) for tuned in shown for point in _with_outcome(tuned, "stopped")]
    if any(seen <= top for seen in stopped):
        yield Key("stopped", "hollow soft", "circle")
    if any(seen > top for seen in stopped):
        yield Key("stopped, higher", "hollow soft", "up")
    if any(_with_outcome(tuned, "diverged") for tuned in shown):
        yield Key("diverged", "soft", "x")


def _loss_axis(losses: Sequence[float], above: float, label: str) -> tuple[Axis, float]:
    """Return the axis, which is logarithmic if the losses are positive and far apart, and the highest loss that is shown.

    Args:
        losses: The losses to show.
        above: Share of the height to leave free above the losses.
        label: Label of the axis.
    """
    low, high = min(losses), max(losses)
    above = min(above, 0.4)
    if low > 0 and high / low > 3:
        return log_axis(low, high * (high / low) ** (above / (1 - above)), label), high
    # A few losses far above all others would flatten the valleys.
    usual = float(np.quantile(losses, 0.9))
    high = min(high, usual + 2 * (usual - low)) if usual > low else high
    return padded_axis(low, low + (high - low) / (1 - above), label, pad=0.08), high


def draw_best_rate(results: GroupFindings, base: int) -> Chart:
    """Draw the best learning rate over the batch, the fitted power law with its interval, and a line for each rule."""
    optima = [(tuned, tuned.optimum) for tuned in results.main.batches if tuned.optimum]
    batches = [at.batch for at in results.main.batches]
    if not optima:
        raise NoFigure(_why_no_loss(results.main.batches))
    if len(batches) < 2:
        raise NoFigure(results.main.problem)
    fit = results.main.laws[0].fit if results.main.laws else None
    at_base = next((optimum for tuned, optimum in optima if tuned.batch == base and optimum.interior), None)
    others = {
        tuning.rules[0]: [one for tuned in tuning.batches if (one := tuned.optimum) and tuned.batch != base]
        for tuning in results.others
    }
    x = np.geomspace(min(batches), max(batches), 200)
    rules = _rules_with_lines(results)
    lines = {power: at_base.rate * (x / base) ** power for power in rules} if at_base else {}
    rates = [optimum.rate for _, optimum in optima] + [optimum.rate for best in others.values() for optimum in best]
    rates += [fit.factor * batch**fit.exponent for batch in batches] if fit else []
    y = _rate_axis(rates, [end for line in lines.values() for end in line[[0, -1]].tolist()])
    layers, keys = _fit_layers(fit, x, y)
    for power, line in lines.items():
        rule = rules[power][0]
        layers.append(Line(x, y.inside(line), f"thin {rule_css(rule)}", RULES[rule].mark.dash))
        keys.append(rule_key(", ".join(rules[power]), rule))
    for tuned, optimum in optima:
        seeds, css = tuned.rates_by_seed(), batch_css(tuned.batch)
        if len(seeds) > 1 and optimum.interior:
            layers.append(Line(np.full(2, tuned.batch), np.array([min(seeds), max(seeds)]), f"wide-bar {css}"))
        glyph, look = best_look(optimum, "circle")
        layers.append(Points([tuned.batch], [optimum.rate], css + look, glyph))
    for rule, best in others.items():
        if best:
            css, glyph = f"hollow {rule_css(rule)}", RULES[rule].mark.shape
            layers.append(Points([optimum.batch for optimum in best], [optimum.rate for optimum in best], css, glyph))
            keys.append(Key(f"best under {rule}", css, glyph))
    keys += [] if all(optimum.interior for _, optimum in optima) else [A_BOUND]
    return Chart(batch_axis(batches), y, layers, keys)


def _rules_with_lines(results: GroupFindings) -> dict[float, list[RuleName]]:
    """Return the rules that scale with a power of the batch, by their exponent. Rules with the same exponent share a line."""
    names = [verdict.rule for law in results.main.laws[:1] for verdict in law.verdicts] or list(powers())
    exponents = [(RULES[name].exponent, name) for name in dict.fromkeys(names)]
    return {power: [name for one, name in exponents if one == power] for power, _ in exponents if power is not None}


def _rate_axis(rates: Sequence[float], ends: Sequence[float]) -> Axis:
    """Return the axis of best rates, with room for the ends of the lines of rules up to REACH."""
    low, high = min(rates), max(rates)
    low, high = (
        min([low, *(max(end, low / REACH) for end in ends)]),
        max([high, *(min(end, high * REACH) for end in ends)]),
    )
    middle, half = sqrt(low * high), max(sqrt(high / low), 2.0)  # the height must not be 0 if all rates are equal
    return log_axis(middle / half, middle * half, "best learning rate", pad=0.08)


def _fit_layers(fit: PowerLaw | None, x: Floats, y: Axis) -> tuple[list[Layer], list[Key]]:
    if fit is None:
        return [], []
    line = fit.factor * x**fit.exponent
    layers: list[Layer] = [Line(x, y.inside(line), "thin ink")]
    label = "no interval: two batches"
    if isfinite(fit.interval.high - fit.interval.low):
        # The level at the middle batch and the slope are independent.
        away = np.log(x) - np.mean(np.log([tuned.batch for tuned in fit.used]))
        down, up = fit.exponent - fit.interval.low, fit.interval.high - fit.exponent
        above = np.hypot(fit.level, away * np.where(away > 0, up, down))
        below = np.hypot(fit.level, away * np.where(away > 0, down, up))
        layers.insert(0, Band(x, line * np.exp(-below), line * np.exp(above)))
        label = f"95 % {interval_text(fit.interval)}"
    return layers, [Key(f"batch^{fit.exponent:.2f} ({label})", "thin ink", is_line=True)]


def draw_predicted(results: GroupFindings, base: int) -> Chart:
    """Draw the ratio of predicted to tuned rates over the batch. Rules predict rates from the tuned rate of the base batch."""
    rows = [
        (prediction.rule, prediction.batch, *prediction.ratio) for prediction in results.predictions if prediction.ratio
    ]
    if not rows:
        at_base = next((tuned for tuned in results.main.batches if tuned.batch == base), None)
        raise NoFigure(
            f"rules predict from the base batch: {at_base.problem}"
            if at_base and at_base.problem
            else results.main.problem or "only the base batch has a tuned learning rate"
        )
    ratios = [ratio for *_, ratio in rows]
    x = batch_axis(sorted({base, *(batch for _, batch, _, _ in rows)}))
    y = log_axis(min([*ratios, 0.9]), max([*ratios, 1.1]), "predicted over tuned learning rate", pad=0.1)
    layers: list[Layer] = [Line(np.array([x.low, x.high]), np.ones(2), "thin axis-color")]
    keys = []
    for rule in dict.fromkeys(rule for rule, *_ in rows):
        mine = [(batch, bound, ratio) for name, batch, bound, ratio in rows if name == rule]
        css, mark = rule_css(rule), RULES[rule].mark
        sizes, line = (
            np.array([base, *(batch for batch, _, _ in mine)]),
            np.array([1.0, *(ratio for *_, ratio in mine)]),
        )
        layers.append(Line(sizes, line, f"thin {css}", mark.dash))
        layers += [
            Points([batch], [ratio], f"{css}{' hollow' if bound else ''}", mark.shape) for batch, bound, ratio in mine
        ]
        keys.append(rule_key(rule, rule, mark.shape))
    keys += [Key("a bound", "hollow soft", "circle")] if any(bound for _, _, bound, _ in rows) else []
    return Chart(x, y, layers, keys)


MAP_KEYS: dict[Outcome, Key] = {
    "diverged": Key("diverged", "bad", "cross"),
    "failed": Key("failed", "hollow ink", "square"),
    "stopped": Key("stopped", "hollow soft", "circle"),
    "unfinished": Key("unfinished", "hollow axis-color", "square"),
}


def draw_map(tuning: Tuning) -> Chart:
    """Draw a map over batch and learning rate, with the loss above the lowest one of its batch, and with trials that have no loss."""
    points = [(tuned, point) for tuned in tuning.batches for point in tuned.points]
    if not points:
        raise NoFigure("no trial has started yet")
    above = [point.loss - tuned.lowest.loss if tuned.lowest else inf for tuned, point in points]
    positive = [value for value in above if 0 < value < inf]
    # The limit keeps two nearly equal losses from taking most of the colours.
    low, high = (max(min(positive), max(positive) / SPAN), max(positive)) if positive else (1.0, 1.0)
    span = log(high / low) or 1.0
    cell = _cell(tuning.batches)
    layers: list[Layer] = []
    for (tuned, point), value in zip(points, above, strict=True):
        key = MAP_KEYS.get(point.outcome) or Key("", level_css(max(log(max(value, low) / low) / span, 0.0)))
        glyph = "x" if cell == "cell" and point.outcome == "diverged" else key.glyph or cell
        layers.append(Points([tuned.batch], [point.rate], key.css, glyph))
    best = [tuned.optimum for tuned in tuning.batches if tuned.optimum]
    layers.append(Points([optimum.batch for optimum in best], [optimum.rate for optimum in best], "hollow ink", "star"))
    keys = [key for outcome, key in MAP_KEYS.items() if any(point.outcome == outcome for _, point in points)]
    keys += [Key("best", "hollow ink", "star")] if best else []
    if positive:
        keys += [
            Key(f"+{number(low * (high / low) ** share, 2)}", level_css(share), "patch") for share in (0.0, 0.5, 1.0)
        ]
    rates = [point.rate for _, point in points]
    legend = "loss over the lowest of its batch" if positive else ""
    y = log_axis(min(rates), max(rates), "learning rate")
    return Chart(batch_axis([at.batch for at in tuning.batches]), y, layers, keys, legend)


def _cell(batches: Sequence[AtBatch]) -> Glyph:
    """Return a glyph that is so low that most neighbours in a column of the map do not overlap."""
    rates = [np.log([point.rate for point in tuned.points]) for tuned in batches if tuned.points]
    span = max(at_batch.max() for at_batch in rates) - min(at_batch.min() for at_batch in rates)
    gaps = np.concatenate(list(map(np.diff, rates)))
    px = PLOT_PX * float(np.quantile(gaps, 0.25)) / span if len(gaps) and span else PLOT_PX
    return "patch" if px > 12 else "square" if px > 8 else "cell"


def _why_no_loss(batches: Sequence[AtBatch]) -> str:
    outcomes = {point.outcome for tuned in batches for point in tuned.points}
    if outcomes == {"diverged"}:
        return "every learning rate diverged at every batch; lower rates are needed"
    return "no trial is complete" if outcomes else "no trial has started yet"
