"""Figures of a study. Each figure is a plot, or a sentence with the reason why there is none."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from undula.study.findings import Findings, GroupFindings, best_record
from undula.study.fits import ParetoFit
from undula.study.rates import Fewest, is_open, optimizer_words, over_common_seeds
from undula.study.render.drawing import (
    BAND,
    INK,
    PAPER,
    SOFT,
    Drawn,
    NoFigure,
    batch_axis,
    batch_colors,
    draw,
    legend_above,
    log_axis,
    new_axes,
    styled,
    tick_label,
)
from undula.study.render.rate_figures import draw_best_rate, draw_map, draw_predicted, draw_rates
from undula.study.spec import Optimizer, StudySpec
from undula.study.verdicts import critical_batch_text, interval_text, is_bounded

WARMUP_DASHES = ("-", (0, (6, 2)), (0, (1.2, 1.6)), (0, (6, 1.5, 1, 1.5)))


@dataclass(frozen=True)
class StudyFigure:
    """Figure of the report."""

    name: str
    """Name of the figure's files, without the extension."""
    title: str
    note: str
    """Explanation of how to read the figure."""
    drawn: Drawn | None
    problem: str
    """Sentence with the reason why there is no plot; empty if there is one."""


def group_figures(findings: Findings, found: GroupFindings) -> Iterator[StudyFigure]:
    """Yield the figures of a group, in the order of the page."""
    spec, key = findings.spec, found.group.key
    base = spec.batches[0]
    plans: list[tuple[str, str, str, Callable[[], Figure]]] = [
        (
            "steps", "Steps to the target",
            "The fewest steps over all learning rates, as the mean over seeds; small dots are single seeds. Perfect scaling "
            "halves the steps when the batch doubles.",
            partial(draw_to_target, found, spec, "steps"),
        ),
        (
            "samples", "Samples to the target",
            "The samples of the trials with the fewest steps."
            + (" Up to the critical batch, whose interval is the band, a larger batch costs few extra samples." if found.pareto else ""),
            partial(draw_to_target, found, spec, "samples"),
        ),
        (
            "pareto", "Steps against samples",
            "Up and to the left, trials take fewer steps and more samples. Numbers are batches." + _pareto_note(found.pareto),
            partial(draw_pareto, found, spec),
        ),
        (
            "rates", "Loss against learning rate",
            "The loss after the same number of samples at each batch."
            + (" Bars show the standard deviation over seeds." if len(spec.seeds) > 1 else "")
            + (
                " A star marks the vertex of a parabola through the lowest loss and its neighbours."
                if any(each.optimum and each.optimum.interior for each in found.main.batches)
                else ""
            ),
            partial(draw_rates, found, found.main, spec),
        ),
        (
            "best-rate", "Best learning rate against batch",
            "The lines of the rules start at the best rate of the base batch, unless that is only a bound."
            + (" The band is the 95 % interval of the fit." if any(isfinite(law.fit.level) for law in found.main.laws[:1]) else "")
            + (" Wide bars span the best rates of single seeds." if len(spec.seeds) > 1 else ""),
            partial(draw_best_rate, found, base),
        ),
        (
            "predicted", "Predicted against tuned learning rate",
            "Above 1, a rule predicts a higher rate than the best one; below 1, a lower rate.",
            partial(draw_predicted, found, base),
        ),
        (
            "noise", "Gradient noise scale over training",
            "The noise scale of the best trial at each batch."
            + (" The band is the interval of the critical batch." if found.pareto else ""),
            partial(draw_noise, found),
        ),
        (
            "map", "Loss and divergence by batch and learning rate",
            "Bright squares are near the lowest loss of their batch.", partial(draw_map, found, found.main),
        ),
    ]  # fmt: skip
    for tuning in found.others:
        rule = tuning.rules[0]
        text = "All rules agree at the base batch."
        plans.append(
            (
                f"rates-{rule}",
                f"Loss against learning rate under {rule}",
                text,
                partial(draw_rates, found, tuning, spec),
            )
        )
    for name, title, note, make in plans:
        yield _made(f"{key}-{name}", title, note, f"{title}: {found.group.title}", make)


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
        yield _made(f"{optimizer}-warmup", title, note, title, partial(draw_warmups, findings, optimizer))


def _made(name: str, title: str, note: str, label: str, make: Callable[[], Figure]) -> StudyFigure:
    with styled():
        try:
            return StudyFigure(name, title, note, draw(make(), name, label), "")
        except NoFigure as reason:
            text = str(reason)
            return StudyFigure(name, title, note, None, f"{text[:1].upper()}{text[1:]}.")


def _reached(found: GroupFindings) -> list[tuple[int, Fewest]]:
    return [(each.batch, each.fewest) for each in found.main.batches if each.fewest]


def draw_to_target(found: GroupFindings, spec: StudySpec, what: str) -> Figure:
    """Draw the steps or samples to the target over the batch, with perfect scaling and the fit; `what` is `steps` or `samples`."""
    rows = _reached(found)
    if not rows or len(found.main.batches) < 2:
        raise NoFigure(found.pareto_problem or f"the study has one batch ({spec.batches[0]:,})")
    batches = [each.batch for each in found.main.batches]
    colors, fit = batch_colors(batches), found.pareto
    figure, axes = new_axes()
    batch_axis(axes, batches)
    x = np.geomspace(min(batches), max(batches), 80)
    first, least = rows[0]
    in_samples = what == "samples"
    ideal = np.full(len(x), least.mean_samples) if in_samples else least.mean_steps * first / x
    values = [value for _, each in rows for value in (each.samples if in_samples else each.steps)]
    keys = [Line2D([], [], color=SOFT, ls=(0, (4, 2)), lw=1.1, label="perfect scaling")]
    log_axis(axes.yaxis, min(*values, *(ideal if not in_samples else values)), max([*values, ideal.max()]), pad=0.08)
    if fit:
        fitted = fit.fewest_steps * (1 + fit.critical_batch / x) * (x if in_samples else 1)
        axes.plot(x, fitted, color=INK, lw=1.2, zorder=2)
        keys.append(Line2D([], [], color=INK, lw=1.2, label="fit"))
        keys += _critical_band(axes, found, batches)
    axes.plot(x, ideal, color=SOFT, ls=(0, (4, 2)), lw=1.1, zorder=2)
    for batch, each in rows:
        seeds = each.samples if in_samples else each.steps
        if len(seeds) > 1:
            axes.plot([batch] * len(seeds), seeds, "o", color=colors[batch], ms=2.4, alpha=0.6, zorder=3)
        mean = each.mean_samples if in_samples else each.mean_steps
        face = PAPER if is_open(each) else colors[batch]
        axes.plot([batch], [mean], "o", color=colors[batch], mfc=face, mew=1.3, ms=6, zorder=4)
    if any(is_open(each) for _, each in rows):
        keys.append(Line2D([], [], ls="", marker="o", color=INK, mfc=PAPER, ms=5, label="a bound"))
    axes.set_ylabel(f"{what} to a {spec.metric.replace('_', ' ')} of {spec.target:g}")
    legend_above(figure, keys, columns=3)
    return figure


def _critical_band(axes: Axes, found: GroupFindings, batches: Sequence[int]) -> list[Line2D]:
    """Draw the parts of the critical batch and its interval that are inside the plot, and return their legend entry."""
    fit, (left, right) = found.pareto, axes.get_xlim()
    if fit is None:
        return []
    low, high = max(fit.interval.low, left), min(fit.interval.high, right)
    if low < high:
        axes.axvspan(low, high, color=BAND, lw=0, zorder=0)
    if is_bounded(fit) and left < fit.critical_batch < right:
        axes.axvline(fit.critical_batch, color=INK, lw=0.9, ls=(0, (1, 2)), zorder=1)
    return [_critical_key(fit, _critical_label(fit))]


def _critical_key(fit: ParetoFit, label: str) -> Line2D:
    """Return the legend entry of the dotted line, or of the band if there is no line."""
    if is_bounded(fit):
        return Line2D([], [], color=INK, lw=0.9, ls=(0, (1, 2)), label=label)
    return Line2D([], [], color=BAND, lw=6, label=label)


def _critical_label(fit: ParetoFit) -> str:
    words = critical_batch_text(fit)
    return f"critical batch {words}" + (f" ({interval_text(fit.interval, 0)})" if is_bounded(fit) else "")


def draw_pareto(found: GroupFindings, spec: StudySpec) -> Figure:
    """Draw the samples over the steps to the target, with the fitted hyperbola."""
    rows, fit = _reached(found), found.pareto
    if len(rows) < 2:
        raise NoFigure(found.pareto_problem)
    batches = [each.batch for each in found.main.batches]
    colors = batch_colors(batches)
    figure, axes = new_axes()
    steps, samples = [each.mean_steps for _, each in rows], [each.mean_samples for _, each in rows]
    least = ([fit.fewest_steps], [fit.fewest_samples]) if fit and is_bounded(fit) else ([], [])
    log_axis(axes.xaxis, min([*steps, *least[0]]), max(steps), pad=0.1)
    log_axis(axes.yaxis, min([*samples, *least[1]]), max(samples), pad=0.14)
    keys = []
    if fit:
        there = np.geomspace(min(batches) / 30, max(batches) * 30, 200)
        found_steps = fit.fewest_steps * (1 + fit.critical_batch / there)
        axes.plot(found_steps, found_steps * there, color=INK, lw=1.2, zorder=2)
        axes.axvline(fit.fewest_steps, color=SOFT, lw=0.9, ls=(0, (1, 2)), zorder=1)
        axes.axhline(fit.fewest_samples, color=SOFT, lw=0.9, ls=(0, (1, 2)), zorder=1)
        keys = [Line2D([], [], color=INK, lw=1.2, label="fit")]
        if is_bounded(fit):
            axes.plot(
                [2 * fit.fewest_steps], [2 * fit.fewest_samples], "*", color=INK, mec=PAPER, mew=0.6, ms=12, zorder=5
            )
            keys.append(Line2D([], [], ls="", marker="*", color=INK, ms=9, label=_critical_label(fit)))
    for batch, each in rows:
        face = PAPER if is_open(each) else colors[batch]
        axes.plot([each.mean_steps], [each.mean_samples], "o", color=colors[batch], mfc=face, mew=1.3, ms=6, zorder=4)
        under = fit is not None and each.mean_steps < fit.fewest_steps * (1 + fit.critical_batch / batch)
        offset, side = ((-5, -9), "right") if under else ((5, 4), "left")
        place = (each.mean_steps, each.mean_samples)
        axes.annotate(f"{batch:,}", place, offset, textcoords="offset points", fontsize=7.5, color=SOFT, ha=side)
    axes.set_xlabel("steps to the target, S")
    axes.set_ylabel("samples to the target, E")
    legend_above(figure, keys)
    return figure


def draw_noise(found: GroupFindings) -> Figure:
    """Draw the gradient noise scale during the best trial at each batch, with the critical batch."""
    curves = []
    for each in found.main.batches:
        record = best_record(each)
        kept = [(at, scale) for at, scale in record.noise if isfinite(scale) and scale > 0] if record else []
        curves += [(each.batch, kept)] if kept else []
    if not curves:
        raise NoFigure("none of the best trials measured the gradient noise scale")
    colors = batch_colors([each.batch for each in found.main.batches])
    figure, axes = new_axes()
    scales = [scale for _, kept in curves for _, scale in kept]
    fit = found.pareto
    bounds = [fit.critical_batch] if fit and is_bounded(fit) else []
    log_axis(axes.yaxis, min([*scales, *bounds]), max([*scales, *bounds]), pad=0.08)
    keys = []
    if fit:
        bottom, top = axes.get_ylim()
        low, high = max(fit.interval.low, bottom), min(fit.interval.high, top)
        if low < high:
            axes.axhspan(low, high, color=BAND, lw=0, zorder=0)
        if bounds:
            axes.axhline(fit.critical_batch, color=INK, lw=0.9, ls=(0, (1, 2)), zorder=1)
        keys.append(_critical_key(fit, f"critical batch {critical_batch_text(fit)}"))
    for batch, kept in curves:
        (line,) = axes.plot([at for at, _ in kept], [scale for _, scale in kept], color=colors[batch], lw=1.4)
        if len(kept) == 1:
            line.set_marker("o")
        keys.append(Line2D([], [], color=colors[batch], label=f"{batch:,}"))
    axes.xaxis.set_major_formatter(lambda value, _: tick_label(value))
    axes.set_xlabel("samples")
    axes.set_ylabel("gradient noise scale (samples)")
    legend_above(figure, [*keys[bool(fit) :], *keys[: bool(fit)]], columns=6, title="batch")
    return figure


def draw_warmups(findings: Findings, optimizer: Optimizer) -> Figure:
    """Draw the lowest loss over the batch, with a line for each warmup."""
    groups = [found for found in findings.groups if found.group.optimizer == optimizer]
    if len(groups) < 2:
        raise NoFigure(
            f"the study has one warmup ({findings.spec.warmup_axis[0]:,} samples), but an ablation takes two or more"
        )
    by_batch = [over_common_seeds(found) for found in zip(*(found.main.batches for found in groups), strict=True)]
    rows = {
        found.group.warmup: [(each[place].batch, lowest) for each in by_batch if (lowest := each[place].lowest)]
        for place, found in enumerate(groups)
    }
    losses = [point.loss for found in rows.values() for _, point in found]
    if not losses:
        raise NoFigure("no trial is complete")
    figure, axes = new_axes()
    batch_axis(axes, [each.batch for each in groups[0].main.batches])
    if min(losses) > 0 and max(losses) > 2 * min(losses):
        tops = [point.loss + (point.deviation or 0.0) for found in rows.values() for _, point in found]
        log_axis(axes.yaxis, min(losses) / 2, max(tops), pad=0.08)
    keys = []
    colors = batch_colors(range(1, 2 + len(rows)))
    for place, (warmup, found) in enumerate(rows.items()):
        color, shift = (
            colors[place + 1],
            1 + 0.02 * (place - (len(rows) - 1) / 2),  # keeps bars from covering each other
        )
        x = [batch * shift for batch, _ in found]
        label = f"{warmup:,} samples" if warmup else "none"
        dashes = WARMUP_DASHES[place % len(WARMUP_DASHES)]
        axes.errorbar(
            x, [point.loss for _, point in found], [point.deviation or 0.0 for _, point in found],
            color=color, ls=dashes, marker="o", ms=4.5, elinewidth=1, capsize=2, lw=1.4,
        )  # fmt: skip
        keys.append(Line2D([], [], color=color, ls=dashes, marker="o", ms=4.5, label=label))
    axes.set_ylabel(f"lowest {findings.spec.metric.replace('_', ' ')}")
    legend_above(figure, keys, title="warmup")
    return figure
