"""What is fitted to a study's results: the critical batch, the best learning rate and its power of the batch. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, Literal

import numpy as np
from scipy.special import ndtri, stdtrit

Floats = np.ndarray[Any, np.dtype[np.float64]]
Edge = Literal["lowest", "highest", "diverged"]
Bound = Literal["≥", "≤"]

RULE_EXPONENTS: Mapping[str, float] = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}
"""Rules that are a power of the batch, and their power."""
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
    """The fit's, where there is one; else the lowest."""
    edge: Edge | None
    """Where the lowest loss was at an end of the rates that were tried, so that the best may lie beyond; or beside one that diverged."""

    @property
    def interior(self) -> bool:
        return self.edge is None

    @property
    def bound(self) -> Bound | None:
        """What the rate is of the best one, where it is a bound: `≥` says that the best is as high or higher."""
        return None if self.edge is None else "≤" if self.edge == "lowest" else "≥"


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


def about_lowest(rates: Sequence[float], lowest: int) -> tuple[slice, Edge | None]:
    """The learning rates that tell where the optimum about the lowest loss is: those around it, out to the first that is APART times
    away on either side. And the side on which there are none, or none but a near copy of the lowest, so that the best may lie beyond.

    Args:
        rates: ascending.
        lowest: the place of the lowest loss.
    """
    place = np.log(np.asarray(rates) / rates[lowest])
    left = max((at for at in range(lowest) if place[at] <= -log(APART)), default=0)
    right = min((at for at in range(lowest, len(rates)) if place[at] >= log(APART)), default=len(rates) - 1)
    below, above = -place[left], place[right]
    edge: Edge | None = None
    if below == 0 or below < min(log(APART), above / 4):
        edge = "lowest"
    elif above == 0 or above < min(log(APART), below / 4):
        edge = "highest"
    return slice(left, right + 1), edge


def best_rate(batch: float, rates: Sequence[float], losses: Sequence[float]) -> Optimum:
    """The optimum of loss against log learning rate: the vertex of a parabola, by least squares, through the lowest loss and those
    around it (`about_lowest`).

    Args:
        batch: that all of them were trained with.
        rates: learning rates, all different.
        losses: one a rate; not finite where the training diverged.

    Raises:
        ValueError: no loss is finite.
    """
    order = np.argsort(rates)
    rate, loss = np.asarray(rates, dtype=np.float64)[order], np.asarray(losses, dtype=np.float64)[order]
    if not np.isfinite(loss).any():
        raise ValueError(f"every learning rate diverged at batch {batch:g}: lower ones are needed")
    lowest = int(np.argmin(np.where(np.isfinite(loss), loss, np.inf)))
    measured = Optimum(batch, float(rate[lowest]), float(loss[lowest]), None)
    about, edge = about_lowest(rate.tolist(), lowest)
    if edge is None and not np.isfinite(loss[about]).all():
        edge = "diverged"
    if edge:
        return replace(measured, edge=edge)
    x = np.log(rate[about] / rate[lowest])
    curvature, slope, level = np.polyfit(x, loss[about], 2)
    if curvature <= 0:  # a plateau
        return measured
    vertex = float(np.clip(-slope / (2 * curvature), x[0], x[-1]))
    return Optimum(
        batch, float(rate[lowest] * np.exp(vertex)), float(level + slope * vertex + curvature * vertex**2), None
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
            "a power law takes two; widen the range"
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


def _batch_sizes(count: int) -> str:
    return f"{count or 'no'} batch size{'' if count == 1 else 's'}"
