"""Figures of a study. Each figure is a chart, or a sentence with the reason why there is none."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite

import numpy as np

from undula.report.render.axes import Axis, linear_axis, log_axis, padded_axis
from undula.report.render.chart import Band, Chart, Key, Layer, Line, Points, Text
from undula.study.findings import Findings, GroupFindings, best_record
from undula.study.fits import ParetoFit
from undula.study.rates import Fewest, is_open, optimizer_words, over_common_seeds
from undula.study.render.look import (
    DASHED,
    DOTTED,
    NoFigure,
    batch_axis,
    batch_css,
    critical_key,
    warmup_css,
)
from undula.study.render.rate_figures import deviation_bars, draw_best_rate, draw_map, draw_predicted, draw_rates
from undula.study.spec import Optimizer, StudySpec
from undula.study.verdicts import is_bounded

WARMUP_DASHES = ("", "9 3", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class StudyFigure:
    """Figure of the report."""

    name: str
    """Name of the figure's files, without the extension."""
    title: str
    note: str
    """Explanation of how to read the figure."""
    chart: Chart | None
    problem: str
    """Sentence with the reason why there is no chart; empty if there is one."""


def group_figures(findings: Findings, results: GroupFindings) -> Iterator[StudyFigure]:
    """Yield the figures of a group, in the order of the page."""
    spec, base, fit = findings.spec, findings.spec.batches[0], results.pareto
    has_seeds = len(spec.seeds) > 1
    is_starred = any(tuned.optimum and tuned.optimum.interior for tuned in results.main.batches)
    has_level = any(isfinite(law.fit.level) for law in results.main.laws[:1])
    figures: list[tuple[str, str, str, Callable[[], Chart]]] = [
        (
            "steps", "Steps to the target",
            "The fewest steps over all learning rates, as the mean over seeds; small dots are single seeds. Perfect scaling "
            "halves the steps when the batch doubles.",
            partial(draw_to_target, results, spec, "steps"),
        ),
        (
            "samples", "Samples to the target",
            "The samples of the trials with the fewest steps."
            + (" Up to the critical batch, whose interval is the band, a larger batch costs few extra samples." if fit else ""),
            partial(draw_to_target, results, spec, "samples"),
        ),
        (
            "pareto", "Steps against samples",
            "Up and to the left, trials take fewer steps and more samples. Numbers are batches." + _pareto_note(fit),
            partial(draw_pareto, results),
        ),
        (
            "rates", "Loss against learning rate",
            "The loss after the same number of samples at each batch."
            + (" Bars show the standard deviation over seeds." if has_seeds else "")
            + (" A star marks the vertex of a parabola through the lowest loss and its neighbours." if is_starred else ""),
            partial(draw_rates, results.main, spec),
        ),
        (
            "best-rate", "Best learning rate against batch",
            "The lines of the rules start at the best rate of the base batch, unless that is only a bound."
            + (" The band is the 95 % interval of the fit." if has_level else "")
            + (" Wide bars span the best rates of single seeds." if has_seeds else ""),
            partial(draw_best_rate, results, base),
        ),
        (
            "predicted", "Predicted against tuned learning rate",
            "Above 1, a rule predicts a higher rate than the best one; below 1, a lower rate.",
            partial(draw_predicted, results, base),
        ),
        (
            "noise", "Gradient noise scale over training",
            "The noise scale of the best trial at each batch." + (" The band is the interval of the critical batch." if fit else ""),
            partial(draw_noise, results),
        ),
        (
            "map", "Loss and divergence by batch and learning rate",
            "Bright squares are near the lowest loss of their batch.", partial(draw_map, results.main),
        ),
        *(
            (
                f"rates-{tuning.rules[0]}", f"Loss against learning rate under {tuning.rules[0]}",
                "All rules agree at the base batch.", partial(draw_rates, tuning, spec),
            )
            for tuning in results.others
        ),
    ]  # fmt: skip
    for name, title, note, draw in figures:
        yield _figure(f"{results.group.key}-{name}", title, note, f"{title}: {results.group.title}", draw)


def _pareto_note(fit: ParetoFit | None) -> str:
    if fit is None:
        return ""
    star = ", and the star is the critical batch" if is_bounded(fit) else ""
    return f" The fit is (S / S_min − 1)(E / E_min − 1) = 1; the dotted lines are S_min and E_min{star}."


def warmup_figures(findings: Findings) -> Iterator[StudyFigure]:
    """Yield the figures of the warmup ablation, one for each optimizer."""
    note = "The lowest loss over all learning rates at each batch, as the mean over common seeds with its standard deviation."
    for optimizer in findings.spec.optimizers:
        title = f"Loss against batch by warmup: {optimizer_words(optimizer)}"
        yield _figure(f"{optimizer}-warmup", title, note, title, partial(draw_warmups, findings, optimizer))


def _figure(name: str, title: str, note: str, label: str, draw: Callable[[], Chart]) -> StudyFigure:
    try:
        return StudyFigure(name, title, note, replace(draw(), title=label), "")
    except NoFigure as reason:
        text = str(reason)
        return StudyFigure(name, title, note, None, f"{text[:1].upper()}{text[1:]}.")


def _reached(results: GroupFindings) -> list[tuple[int, Fewest]]:
    return [(tuned.batch, tuned.fewest) for tuned in results.main.batches if tuned.fewest]


def draw_to_target(results: GroupFindings, spec: StudySpec, what: str) -> Chart:
    """Draw the steps or samples to the target over the batch, with perfect scaling and the fit; `what` is `steps` or `samples`."""
    rows, fit, in_samples = _reached(results), results.pareto, what == "samples"
    batches = [at.batch for at in results.main.batches]
    if not rows or len(batches) < 2:
        raise NoFigure(results.pareto_problem or f"the study has one batch ({spec.batches[0]:,})")
    batch_x, x = batch_axis(batches), np.geomspace(min(batches), max(batches), 80)
    first, least = rows[0]
    ideal = np.full(len(x), least.mean_samples) if in_samples else least.mean_steps * first / x
    values = [value for _, fewest in rows for value in (fewest.samples if in_samples else fewest.steps)]
    label = f"{what} to a {spec.metric.replace('_', ' ')} of {spec.target:g}"
    y = log_axis(min(*values, *(values if in_samples else ideal)), max([*values, ideal.max()]), label, pad=0.08)
    keys = [Key("perfect scaling", "thin soft", is_line=True, dash=DASHED)]
    layers: list[Layer] = []
    if fit:
        low, high = max(fit.interval.low, batch_x.low), min(fit.interval.high, batch_x.high)
        layers += [Band(np.array([low, high]), *_ends(y))] if low < high else []
        if is_bounded(fit) and batch_x.low < fit.critical_batch < batch_x.high:
            layers.append(Line(np.full(2, fit.critical_batch), np.array([y.low, y.high]), "thin ink", DOTTED))
        fitted = fit.fewest_steps * (1 + fit.critical_batch / x) * (x if in_samples else 1)
        layers.append(Line(x, y.inside(fitted), "thin ink"))
        keys += [Key("fit", "thin ink", is_line=True), critical_key(fit)]
    layers.append(Line(x, ideal, "thin soft", DASHED))
    for batch, fewest in rows:
        seeds = fewest.samples if in_samples else fewest.steps
        if len(seeds) > 1:
            layers.append(Points([batch] * len(seeds), seeds, f"faint-point {batch_css(batch)}", "dot"))
        layers.append(_mean(batch, batch, fewest.mean_samples if in_samples else fewest.mean_steps, fewest))
    keys += [Key("a bound", "hollow ink", "circle")] if any(is_open(fewest) for _, fewest in rows) else []
    return Chart(batch_x, y, layers, keys)


def _ends(axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of an axis at both ends of a band."""
    return np.full(2, axis.low), np.full(2, axis.high)


def _mean(batch: int, x: float, y: float, fewest: Fewest) -> Points:
    """Return the point of the mean of a batch, which is hollow if it is a bound."""
    return Points([x], [y], f"{batch_css(batch)}{' hollow' if is_open(fewest) else ''}")


def draw_pareto(results: GroupFindings) -> Chart:
    """Draw the samples over the steps to the target, with the fitted hyperbola."""
    rows, fit = _reached(results), results.pareto
    if len(rows) < 2:
        raise NoFigure(results.pareto_problem)
    batches = [at.batch for at in results.main.batches]
    steps, samples = [fewest.mean_steps for _, fewest in rows], [fewest.mean_samples for _, fewest in rows]
    least = [(fit.fewest_steps, fit.fewest_samples)] if fit and is_bounded(fit) else []
    x = log_axis(min([*steps, *(s for s, _ in least)]), max(steps), "steps to the target, S", pad=0.1)
    y = log_axis(min([*samples, *(e for _, e in least)]), max(samples), "samples to the target, E", pad=0.14)
    layers: list[Layer] = []
    keys = []
    if fit:
        sizes = np.geomspace(min(batches) / 30, max(batches) * 30, 200)
        fitted = x.inside(fit.fewest_steps * (1 + fit.critical_batch / sizes))
        s_min, e_min = np.full(2, fit.fewest_steps), np.full(2, fit.fewest_samples)
        layers += [
            Line(fitted, y.inside(fitted * sizes), "thin ink"),
            Line(x.inside(s_min), np.array([y.low, y.high]), "thin soft", DOTTED),
            Line(np.array([x.low, x.high]), y.inside(e_min), "thin soft", DOTTED),
        ]
        keys.append(Key("fit", "thin ink", is_line=True))
        if is_bounded(fit):
            layers.append(Points(2 * s_min[:1], 2 * e_min[:1], "ink", "star"))
            keys.append(replace(critical_key(fit), glyph="star", is_line=False))
    for batch, fewest in rows:
        is_under = fit is not None and fewest.mean_steps < fit.fewest_steps * (1 + fit.critical_batch / batch)
        at = fewest.mean_steps, fewest.mean_samples
        layers.append(_mean(batch, *at, fewest))
        layers.append(Text(*at, f"{batch:,}", -7, 13, "end") if is_under else Text(*at, f"{batch:,}", 7, -5))
    return Chart(x, y, layers, keys)


def draw_noise(results: GroupFindings) -> Chart:
    """Draw the gradient noise scale during the best trial at each batch, with the critical batch."""
    curves = []
    for tuned in results.main.batches:
        record = best_record(tuned)
        kept = [(at, scale) for at, scale in record.noise if isfinite(scale) and scale > 0] if record else []
        curves += [(tuned.batch, np.array(kept).T)] if kept else []
    if not curves:
        raise NoFigure("none of the best trials measured the gradient noise scale")
    fit = results.pareto
    scales = np.concatenate([scale for _, (_, scale) in curves])
    scales = np.append(scales, [fit.critical_batch] if fit and is_bounded(fit) else [])
    x = linear_axis(0.0, max(at[-1] for _, (at, _) in curves), label="samples")
    y = log_axis(scales.min(), scales.max(), "gradient noise scale (samples)", pad=0.08)
    keys = [Key(f"{batch:,}", batch_css(batch), is_line=True) for batch, _ in curves]
    layers: list[Layer] = []
    if fit:
        low, high, ends = max(fit.interval.low, y.low), min(fit.interval.high, y.high), np.array([x.low, x.high])
        layers += [Band(ends, np.full(2, low), np.full(2, high))] if low < high else []
        layers += [Line(ends, np.full(2, fit.critical_batch), "thin ink", DOTTED)] if is_bounded(fit) else []
        keys.append(critical_key(fit, has_interval=False))
    for batch, (at, scale) in curves:
        layers.append(Line(at, scale, batch_css(batch)) if len(at) > 1 else Points(at, scale, batch_css(batch)))
    return Chart(x, y, layers, keys, "batch")


def draw_warmups(findings: Findings, optimizer: Optimizer) -> Chart:
    """Draw the lowest loss over the batch, with a line for each warmup."""
    groups = [results for results in findings.groups if results.group.optimizer == optimizer]
    if len(groups) < 2:
        raise NoFigure(
            f"the study has one warmup ({findings.spec.warmup_axis[0]:,} samples), but an ablation takes two or more"
        )
    by_batch = [
        over_common_seeds(batches) for batches in zip(*(results.main.batches for results in groups), strict=True)
    ]
    curves = [
        [(tunings[place].batch, lowest) for tunings in by_batch if (lowest := tunings[place].lowest)]
        for place in range(len(groups))
    ]
    points = [point for curve in curves for _, point in curve]
    if not points:
        raise NoFigure("no trial is complete")
    losses = [point.loss for point in points]
    bars = [point.loss + sign * (point.deviation or 0.0) for point in points for sign in (-1, 1)]
    label = f"lowest {findings.spec.metric.replace('_', ' ')}"
    is_log = min(losses) > 0 and max(losses) > 2 * min(losses)
    y = log_axis(min(losses) / 2, max(bars), label, pad=0.08) if is_log else padded_axis(min(bars), max(bars), label)
    layers: list[Layer] = []
    keys = []
    for place, (results, curve) in enumerate(zip(groups, curves, strict=True)):
        shift = 1 + 0.02 * (place - (len(groups) - 1) / 2)  # keeps bars from covering each other
        css, dash = warmup_css(place), WARMUP_DASHES[place % len(WARMUP_DASHES)]
        x, loss = np.array([batch * shift for batch, _ in curve]), np.array([point.loss for _, point in curve])
        layers += [Line(x, loss, css, dash), Points(x, loss, css), deviation_bars(x, [p for _, p in curve], y, css)]
        warmup = results.group.warmup
        keys.append(Key(f"{warmup:,} samples" if warmup else "none", css, "circle", is_line=True, dash=dash))
    return Chart(batch_axis([tuned.batch for tuned in groups[0].main.batches]), y, layers, keys, "warmup")
