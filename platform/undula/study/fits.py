"""What is fitted to a study's results: the critical batch, the best learning rate and its power of the batch. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, Literal

import numpy as np
from scipy.special import ndtri, stdtrit

Floats = np.ndarray[Any, np.dtype[np.float64]]
Edge = Literal["lowest", "highest", "diverged", "alone"]
"""Why rates do not bracket the best: it is the lowest or the highest of them, the next higher one diverged, or it stands alone."""
Bound = Literal["≥", "≤", "~"]

RULE_EXPONENTS: Mapping[str, float] = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}
"""Rules that are a power of the batch, and their power."""
BOUNDS: Mapping[Edge, Bound] = {"lowest": "≤", "highest": "≥", "diverged": "≥", "alone": "~"}
BEYOND = 1e4
"""A critical batch is looked for so many times below the smallest batch, and above the largest."""
APART = 1.3
"""Times that two learning rates differ whose losses tell a slope: nearer ones differ by chance more than by it."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether the value lies in it, but for rounding."""
        slack = 1e-9 * max(1.0, abs(value))
        return self.low - slack <= value <= self.high + slack


@dataclass(frozen=True)
class ParetoFit:
    """(S / S_min - 1)(E / E_min - 1) = 1, with S steps and E = S B samples: McCandlish et al. 2018, arXiv:1812.06162, equation 2.11."""

    fewest_steps: float
    """S_min, at a large batch."""
    fewest_samples: float
    """E_min, at a small one."""
    critical_batch: float
    """B_crit = E_min / S_min: twice the fewest steps, and twice the fewest samples."""
    interval: Interval
    """Of the critical batch; from 0 or to infinity where the data do not bound it."""
    inside: bool
    """Whether that interval lies within the batches that were tried."""


@dataclass(frozen=True)
class Optimum:
    """The learning rate with the lowest loss at one batch."""

    batch: float
    rate: float
    loss: float
    """On straight lines between those that were measured: beside a cliff the parabola's own is far below all of them."""
    edge: Edge | None
    """Where the rates that were tried do not bracket it, so that the best may lie beyond."""
    open: float = 0.0
    """Half the distance in log rate within which it may lie, where it is inside and no parabola was fitted."""

    @property
    def interior(self) -> bool:
        return self.edge is None

    @property
    def bound(self) -> Bound | None:
        """What the best rate is to this one, where it is no value: higher, but for a step of the rates; lower; or either."""
        return None if self.edge is None else BOUNDS[self.edge]


@dataclass(frozen=True)
class PowerLaw:
    """rate = factor batch^exponent."""

    factor: float
    exponent: float
    interval: Interval
    """Of the exponent; everything with two points, which leave nothing to judge by."""
    used: tuple[Optimum, ...]
    left_out: tuple[Optimum, ...]
    """At the edge of their rates: bounds, not values."""
    level: float = np.inf
    """Half the interval of the log rate in the middle of the batches."""


def fit_pareto(
    batches: Sequence[float], steps: Sequence[float], resamples: int = 1000, confidence: float = 0.95, seed: int = 0
) -> ParetoFit:
    """Fit S = S_min (1 + B_crit / B), which is the hyperbola with E = S B, by least squares of log S.

    The interval is a bootstrap over residuals, widened by sqrt(n / (n - 2)) for the two parameters that they were fitted with, and by
    Student's quantile over the normal one, as few residuals tell their own size badly.

    Args:
        batches: one a point. Points of one batch share whatever takes the law off there, and are not as good as other batches.
        steps: to the target. A training that never got there is infinite, and is left out.
        resamples: of the bootstrap.
        confidence: of the interval.
        seed: of the bootstrap.

    Raises:
        ValueError: trainings with fewer than three different batches got to the target.
    """
    reached = np.isfinite(steps)
    b, s = np.asarray(batches, dtype=np.float64)[reached], np.asarray(steps, dtype=np.float64)[reached]
    if len(np.unique(b)) < 3:
        raise ValueError(f"{_batch_sizes(len(np.unique(b)))} got to the target: a critical batch takes three")
    critical, fewest = (float(found[0]) for found in _hyperbola(b, np.log(s)[None]))
    fitted = np.log(fewest) + np.log1p(critical / b)
    upper = (1 + confidence) / 2
    residuals = (np.log(s) - fitted) * np.sqrt(len(b) / (len(b) - 2)) * stdtrit(len(b) - 2, upper) / ndtri(upper)
    drawn = np.random.default_rng(seed).integers(len(b), size=(resamples, len(b)))
    spread, _ = _hyperbola(b, fitted + residuals[drawn])
    low, high = np.quantile(spread, [1 - upper, upper])
    low = 0.0 if low <= 2 * b.min() / BEYOND else float(low)
    high = np.inf if high >= b.max() * BEYOND / 2 else float(high)
    inside = bool(b.min() <= low and high <= b.max())
    return ParetoFit(fewest, fewest * critical, critical, Interval(low, high), inside)


def _hyperbola(batches: Floats, log_steps: Floats) -> tuple[Floats, Floats]:
    """B_crit and S_min for each row of log S [rows, points].

    Given B_crit, the best log S_min is a mean, so that one parameter is searched for: on a grid of its logarithm, made finer about the
    lowest point; rounding of the variance leaves it exact to about 1e-7.
    """
    ends = np.log([batches.min() / BEYOND, batches.max() * BEYOND])
    centre = np.full(len(log_steps), ends.mean())
    half = (ends[1] - ends[0]) / 2
    while half > 1e-8:
        tried = np.clip(centre[:, None] + half * np.linspace(-1, 1, 41), *ends)  # [rows, tried]
        # [rows, tried, points]
        rest = log_steps[:, None, :] - np.log1p(np.exp(tried)[..., None] / batches)
        centre = np.take_along_axis(tried, rest.var(axis=-1).argmin(axis=-1)[:, None], axis=1)[:, 0]
        half /= 10
    critical = np.exp(centre)
    fewest = np.exp(np.mean(log_steps - np.log1p(critical[:, None] / batches), axis=-1))
    return critical, fewest


def about_lowest(rates: Sequence[float], lowest: int, diverged: Sequence[bool]) -> tuple[slice, Edge | None]:
    """The learning rates that tell where the optimum about the lowest loss is: those around it, out to the first that is APART times
    away on either side. And why they do not bracket it, where on a side there is none, none but a near copy of the lowest, or one that
    diverged.

    Args:
        rates: ascending.
        lowest: the place of the lowest loss.
        diverged: one a rate.
    """
    place, apart = np.log(np.asarray(rates) / rates[lowest]), log(APART) - 1e-3
    left = max((at for at in range(lowest) if place[at] <= -apart), default=0)
    right = min((at for at in range(lowest, len(rates)) if place[at] >= apart), default=len(rates) - 1)
    below, above = -place[left], place[right]
    is_below = below > 0 and below >= min(apart, above / 4) and not any(diverged[left:lowest])
    is_above = above > 0 and above >= min(apart, below / 4) and not any(diverged[lowest + 1 : right + 1])
    edge: Edge | None = "alone"
    if is_below and is_above:
        edge = None
    elif is_below:
        edge = "diverged" if any(diverged[lowest + 1 : right + 1]) else "highest"
    elif is_above and not any(diverged[left:lowest]):
        edge = "lowest"
    return slice(left, right + 1), edge


def best_rate(
    batch: float, rates: Sequence[float], losses: Sequence[float], lost: Sequence[bool] | None = None
) -> Optimum:
    """The optimum of loss against log learning rate: the vertex of a parabola, by least squares, through the lowest loss and those
    around it (`about_lowest`). Where no parabola goes through them the optimum is the lowest loss, and open between its neighbours.

    Args:
        batch: that all of them were trained with.
        rates: learning rates, all different.
        losses: one a rate; not finite where the training diverged.
        lost: one a rate: whether the training lost, and its loss is no point of a parabola.

    Raises:
        ValueError: no loss is finite.
    """
    order = np.argsort(rates)
    rate, loss = np.asarray(rates, dtype=np.float64)[order], np.asarray(losses, dtype=np.float64)[order]
    behind = np.asarray(lost if lost is not None else [False] * len(rates), dtype=bool)[order]
    counted = np.isfinite(loss) & ~behind
    if not counted.any():
        raise ValueError(f"every learning rate diverged at batch {batch:g}: lower ones are needed")
    lowest = int(np.argmin(np.where(counted, loss, np.inf)))
    about, edge = about_lowest(rate.tolist(), lowest, (~counted & ~behind).tolist())
    measured = Optimum(batch, float(rate[lowest]), float(loss[lowest]), edge)
    if edge:
        return measured
    x = np.log(rate[about] / rate[lowest])
    between = replace(measured, open=float(x[-1] - x[0]) / 4)
    if behind[about].any():
        return between
    curvature, slope, _level = np.polyfit(x, loss[about], 2)
    vertex = -slope / (2 * curvature) if curvature > 0 else np.inf
    if not x[0] < vertex < x[-1]:  # a plateau, or noise
        return between
    return replace(
        measured,
        rate=float(rate[lowest] * np.exp(vertex)),
        loss=float(np.interp(vertex, x, loss[about])),
    )


def fit_power_law(optima: Sequence[Optimum], confidence: float = 0.95) -> PowerLaw:
    """Least squares of log rate against log batch, over optima that lie inside their range; the exponent's interval is Student's.

    Raises:
        ValueError: fewer than two different batches have such an optimum.
    """
    used = tuple(entry for entry in optima if entry.interior)
    left_out = tuple(entry for entry in optima if not entry.interior)
    if len({entry.batch for entry in used}) < 2:
        raise ValueError(
            f"the best learning rate of {_batch_sizes(len({entry.batch for entry in used}))} is inside the range that was tried: "
            f"a power law takes two{_more_rates(left_out)}"
        )
    x, y = np.log([entry.batch for entry in used]), np.log([entry.rate for entry in used])
    away = x - x.mean()
    exponent = float(away @ y / (away @ away))
    residuals = y - y.mean() - exponent * away
    free = len(used) - 2
    error = np.sqrt(residuals @ residuals / free / (away @ away)) if free else np.inf
    reach = float(stdtrit(free, (1 + confidence) / 2) * error) if free else np.inf
    factor = float(np.exp(y.mean() - exponent * x.mean()))
    level = reach * float(np.sqrt(away @ away / len(used)))
    return PowerLaw(factor, exponent, Interval(exponent - reach, exponent + reach), used, left_out, level)


def _more_rates(left_out: Sequence[Optimum]) -> str:
    """What brackets the optima that are bounds."""
    edges = {entry.edge for entry in left_out}
    if edges <= {"lowest", "highest"}:
        return "; widen the range" if edges else ""
    return "; more learning rates are needed about the best"


def _batch_sizes(count: int) -> str:
    return f"{count or 'no'} batch size{'' if count == 1 else 's'}"
