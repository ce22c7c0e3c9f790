"""Page of a comparison: the curves of several runs over one another, the settings that differ, and what was verified."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from undula.report.data.comparison import Agreement, ComparedRun, Comparison
from undula.report.data.curves import (
    AxisName,
    CurvePoints,
    downsample,
    metric_curves,
    points_of,
    smooth,
    validation_curve,
)
from undula.report.data.summary import Floats, column
from undula.report.render.axes import Axis
from undula.report.render.html import SHARED_PACKAGE, colors_css, render_page
from undula.report.render.run_charts import Curve, RunChart, Shape, smoothing_window, tooltip_data, x_axis
from undula.report.text import DASH, counted, dollars, duration, number, printable

POINTS = 800
"""Maximum number of points of a curve."""
VALUE_CHARACTERS = 120
"""Maximum number of characters of a setting's value."""
AXIS_LABELS: dict[AxisName, str] = {"samples": "samples", "step": "steps", "time": "wall time", "dollars": "dollars"}
COLORS = (
    ("#1f5fae", "#6ea8ec"),
    ("#b8500f", "#f2a35e"),
    ("#0c756c", "#4fc3b5"),
    ("#8a3fb0", "#c78ff0"),
    ("#c22a5a", "#ff8aa8"),
    ("#5f7a14", "#b5cf5a"),
    ("#7a5a3a", "#d0ab84"),
    ("#566170", "#a9b6c5"),
)
"""Colours of the runs on a light and on a dark page. The first run has a wide grey curve, below which equal ones do not vanish."""
FIRST = ("#c3c9d2", "#5f6b79")
"""Colour of the first run."""
MOST_RUNS = len(COLORS)
"""Maximum number of runs of a comparison."""
PointsAndValues = tuple[CurvePoints, Floats]


def render_comparison(comparison: Comparison) -> str:
    """Return the page as HTML."""
    charts = list(_charts(comparison))
    axes = {name: axis for name in AXIS_LABELS if (axis := _axis(comparison, name))}
    labels = [printable(run.label, 80) for run in comparison.runs]
    context = {
        "name": " · ".join(labels[:3]) + (" · …" if len(labels) > 3 else ""),
        "state": "",
        "facts": [f"comparison of {counted(len(labels), 'run')}"],
        "tiles": [],
        "labels": labels,
        "head": ("State", "Steps", "Validation loss", "Best", "Training loss", "Samples/s", "Wall time", "Dollars"),
        "rows": [(_css(place), _cells(run)) for place, run in enumerate(comparison.runs)],
        "axes": [(name, AXIS_LABELS[name]) for name in axes],
        "views_of_charts": [(name, [chart.over(name, axis) for chart in charts]) for name, axis in axes.items()],
        "without_price": [printable(run.label, 80) for run in comparison.runs if run.step_dollars is None],
        "settings": [
            (printable(key, 80), [printable(value, VALUE_CHARACTERS) for value in values])
            for key, values in comparison.settings
        ],
        "sentences": [*map(_sentence, comparison.agreements), *_alone(comparison)],
        "data": {**tooltip_data(charts, axes, ()), "compares": True},
    }
    colors = {_css(place): pair for place, pair in enumerate((FIRST, *COLORS[1:]))}
    return render_page("compare.html", context, package=SHARED_PACKAGE, script="run.js", more_style=colors_css(colors))


def _css(place: int) -> str:
    """Return the CSS class of a run's curves."""
    return f"r-{place}" if place else "r-first"


def _cells(run: ComparedRun) -> list[str]:
    """Return the figures of a run for the table of the runs."""
    summary = run.summary
    best = DASH
    if summary.best_validation_loss is not None:
        best = f"{number(summary.best_validation_loss)} (step {summary.best_validation_step:,})"
    return [
        summary.state,
        f"{summary.steps:,} of {summary.total_steps:,}",
        number(summary.last_validation_loss),
        best,
        number(summary.training_loss),
        number(summary.samples_per_s),
        duration(summary.wall_s),
        dollars(run.cost.total) if run.cost and not run.cost.unpriced else DASH,
    ]


def _axis(comparison: Comparison, name: AxisName) -> Axis | None:
    """Return an x axis that is long enough for all runs; None if no run has positions on it."""
    highest: list[float] = []
    for run in comparison.runs:
        if len(run.record.ledger.steps):
            on = _points(run).on(name)
            highest += [] if on is None else [float(on.max())]
    return x_axis(name, max(*highest, 1e-3)) if highest else None


def _charts(comparison: Comparison) -> Iterator[RunChart]:
    runs = [run for run in comparison.runs if len(run.record.ledger.steps)]
    names = sorted({name for run in runs for name in metric_curves(run.record, 0.0)})
    validated = [("validation", "Validation loss", _validation), *((f"metric-{n}", n, _metric(n)) for n in names)]
    kinds: list[tuple[str, str, Literal["tall", "middle", "low"], Callable[[ComparedRun], PointsAndValues]]] = [
        ("loss", "Training loss, smoothed", "tall", _training_loss),
        ("world_size", "World size", "low", _recorded("world_size")),
        *((key, title, "tall" if key == "validation" else "middle", curve) for key, title, curve in validated),
        ("lr", "Learning rate", "middle", _recorded("lr")),
    ]
    for key, title, height, curve_of in kinds:
        curves = []
        for place, run in enumerate(comparison.runs):
            points, y = curve_of(run) if run in runs else (None, None)
            if points is not None and y is not None and len(y):
                rows = downsample(y, POINTS)
                shape: Shape = "steps" if height == "low" else "line"
                curves.append(Curve(printable(run.label, 40), _css(place), points.take(rows), y[rows], shape))
        if curves:
            is_size = key == "world_size"
            yield RunChart(
                key, printable(title, 80), "ranks" if is_size else "", height, tuple(curves), from_zero=is_size
            )


def _points(run: ComparedRun) -> CurvePoints:
    """Return the positions of the committed steps of a run."""
    return replace(points_of(run.record.ledger.steps, run.summary.began or 0.0), dollars=run.step_dollars)


def _training_loss(run: ComparedRun) -> PointsAndValues:
    loss = column(run.record.ledger.steps, "loss")
    return _points(run), smooth(loss, smoothing_window(loss))


def _recorded(name: str) -> Callable[[ComparedRun], PointsAndValues]:
    """Return the function that returns the curve of a column of the ledger."""
    return lambda run: (_points(run), column(run.record.ledger.steps, name))


def _validation(run: ComparedRun) -> PointsAndValues:
    points, y = validation_curve(run.record, run.summary.began or 0.0)
    return _with_dollars(points, run), y


def _metric(name: str) -> Callable[[ComparedRun], PointsAndValues]:
    def curve_of(run: ComparedRun) -> PointsAndValues:
        curves = metric_curves(run.record, run.summary.began or 0.0)
        points, y = curves.get(name, (points_of(run.record.ledger.steps.slice(0, 0), 0.0), np.empty(0)))
        return _with_dollars(points, run), y

    return curve_of


def _with_dollars(points: CurvePoints, run: ComparedRun) -> CurvePoints:
    """Return the positions of validations with the cost of the steps before them."""
    if run.step_dollars is None:
        return points
    steps = _points(run).step
    spent = np.concatenate([[0.0], run.step_dollars])
    return replace(points, dollars=spent[np.searchsorted(steps, points.step, side="right")])


def _sentence(agreement: Agreement) -> tuple[str, str, list[str]]:
    """Return the verdict on two runs, a heading, and sentences."""
    certificate = agreement.certificate
    pair = f"{printable(agreement.label, 80)} and {printable(agreement.against, 80)}"
    if certificate.difference:
        return "rejected", f"{pair} differ", [printable(certificate.difference)]
    verdict = "not-rejected" if certificate.proved else "not-tested"
    rest = [f"not proved: {printable(text)}" for text in certificate.not_proved]
    heading = f"{pair} are the same training" if certificate.proved else f"{pair} have the same plan"
    return verdict, heading, [*map(printable, certificate.proved), *rest]


def _alone(comparison: Comparison) -> list[tuple[str, str, list[str]]]:
    names = [printable(label, 80) for label in comparison.alone]
    if not names:
        return []
    who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    text = "has a plan or data" if len(names) == 1 else "each have a plan or data"
    return [("not-tested", f"{who} {text} that no other run here has, so no step can be equal", [])]
