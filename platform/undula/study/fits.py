"""Fits to the results of a study: the critical batch, the best learning rate, and its power law in the batch. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, Literal

import numpy as np
from scipy.special import ndtri, stdtrit

Floats = np.ndarray[Any, np.dtype[np.float64]]
Edge = Literal["lowest", "highest", "diverged", "alone"]
"""Reason why the tried rates do not bracket the best one: it is the lowest or the highest of them, the next higher one diverged, or it has
no neighbours on either side."""
Bound = Literal["≥", "≤", "~"]
"""Relation of the true value to a known one: at least, at most, or either."""

BOUNDS: Mapping[Edge, Bound] = {"lowest": "≤", "highest": "≥", "diverged": "≥", "alone": "~"}
"""Relation of the true best rate to an optimum, by the edge of the optimum."""
BEYOND = 1e4
"""Factor by which the search for a critical batch extends below the smallest and above the largest batch."""
APART = 1.3
"""Minimum ratio of two learning rates whose losses show a slope. The losses of closer rates differ mostly by chance."""


@dataclass(frozen=True)
class Interval:
    """Confidence interval."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Return whether the interval contains a value, with a tolerance for rounding."""
        slack = 1e-9 * max(1.0, abs(value))
        return self.low - slack <= value <= self.high + slack


@dataclass(frozen=True)
class ParetoFit:
    """Hyperbola (S / S_min - 1)(E / E_min - 1) = 1 of steps S and samples E = S B (McCandlish et al. 2018, arXiv:1812.06162)."""

    fewest_steps: float
    """Minimum of steps S_min, which large batches approach."""
    fewest_samples: float
    """Minimum of samples E_min, which small batches approach."""
    critical_batch: float
    """Critical batch B_crit = E_min / S_min in samples, at which a trial takes twice the fewest steps and twice the fewest samples."""
    interval: Interval
    """Interval of the critical batch. It starts at 0 or ends at infinity if the data do not bound it."""
    inside: bool
    """Whether the interval lies within the tried batches."""


@dataclass(frozen=True)
class Optimum:
    """Learning rate with the lowest loss at one batch."""

    batch: float
    rate: float
    loss: float
    """Loss at the optimum, interpolated linearly between measured losses. The parabola can be far below all of them next to divergence."""
    edge: Edge | None
    """Reason why the tried rates do not bracket the optimum, so that the true best rate may lie beyond; None if they do."""
    open: float = 0.0
    """Uncertainty of the optimum in log rate, as half the width, if it is bracketed but no parabola was fitted."""

    @property
    def interior(self) -> bool:
        """Whether the tried rates bracket the optimum."""
        return self.edge is None

    @property
    def bound(self) -> Bound | None:
        """Relation of the true best rate to this one, up to one step of the grid, if this one is only a bound."""
        return None if self.edge is None else BOUNDS[self.edge]


@dataclass(frozen=True)
class PowerLaw:
    """Power law rate = factor batch^exponent."""

    factor: float
    exponent: float
    interval: Interval
    """Interval of the exponent. It is infinite with two points, because they leave no residuals."""
    used: tuple[Optimum, ...]
    """Optima to which the law is fitted."""
    left_out: tuple[Optimum, ...]
    """Optima that the law does not use because they are only bounds."""
    level: float = np.inf
    """Half the width of the interval of the log rate at the middle batch."""


def fit_pareto(
    batches: Sequence[float], steps: Sequence[float], resamples: int = 1000, confidence: float = 0.95, seed: int = 0
) -> ParetoFit:
    """Fit S = S_min (1 + B_crit / B), which is the hyperbola with E = S B, by least squares of log S.

    The interval is a bootstrap over the residuals. It is widened by sqrt(n / (n - 2)) for the two fitted parameters, and by the ratio of
    Student's quantile to the normal one, because few residuals are a poor estimate of their own size.

    Args:
        batches: Batch of each point. Points of the same batch share its deviation from the law, so they add less information than points
            of other batches.
        steps: Steps to the target of each point. Infinite values mean that the target was not reached, and are left out.
        resamples: Number of resamples of the bootstrap.
        confidence: Confidence of the interval, in (0, 1).
        seed: Seed of the bootstrap.

    Raises:
        ValueError: Fewer than three different batches reached the target.
    """
    reached = np.isfinite(steps)
    b, s = np.asarray(batches, dtype=np.float64)[reached], np.asarray(steps, dtype=np.float64)[reached]
    if len(np.unique(b)) < 3:
        raise ValueError(f"{_batch_sizes(len(np.unique(b)))} reached the target, but a critical batch needs three")
    critical, fewest = (float(values[0]) for values in _hyperbola(b, np.log(s)[None]))
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
    """Return B_crit and S_min for each row of log S [rows, points].

    Given B_crit, the best log S_min is a mean, so the search has only one parameter. It uses a grid of log B_crit that is refined about
    the lowest point. The result is exact to about 1e-7, because the variance is rounded.
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
    """Return the learning rates that locate the optimum around the lowest loss.

    On either side, they reach to the first rate whose ratio to the rate with the lowest loss is at least APART. They do not bracket the
    optimum if one side has no rate, only rates that are too close, or a rate that diverged.

    Args:
        rates: Learning rates in ascending order.
        lowest: Index of the rate with the lowest loss.
        diverged: Whether each rate diverged.

    Returns:
        The range of the rates, and the reason why they do not bracket the optimum; None if they do.
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
    """Return the learning rate with the lowest loss, as the vertex of a parabola of the loss over the log rate.

    The parabola is fitted by least squares to the lowest loss and the losses around it (`about_lowest`). If no parabola fits, the optimum
    is the rate with the lowest loss, and may lie anywhere between its neighbours.

    Args:
        batch: Batch of all trainings.
        rates: Learning rates, all different.
        losses: Loss of each rate; not finite if the training diverged.
        lost: Whether each rate is known to be worse for another reason than its loss. Its loss is then not a point of the parabola.

    Raises:
        ValueError: No loss is finite.
    """
    order = np.argsort(rates)
    rate, loss = np.asarray(rates, dtype=np.float64)[order], np.asarray(losses, dtype=np.float64)[order]
    behind = np.asarray(lost if lost is not None else [False] * len(rates), dtype=bool)[order]
    counted = np.isfinite(loss) & ~behind
    if not counted.any():
        raise ValueError(f"every learning rate diverged at batch {batch:g}; add lower ones")
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
    if not x[0] < vertex < x[-1]:  # the losses are a plateau, or noise
        return between
    return replace(
        measured,
        rate=float(rate[lowest] * np.exp(vertex)),
        loss=float(np.interp(vertex, x, loss[about])),
    )


def fit_power_law(optima: Sequence[Optimum], confidence: float = 0.95) -> PowerLaw:
    """Fit a power law to the bracketed optima, by least squares of log rate over log batch.

    The interval of the exponent is Student's.

    Raises:
        ValueError: Fewer than two different batches have a bracketed optimum.
    """
    used = tuple(entry for entry in optima if entry.interior)
    left_out = tuple(entry for entry in optima if not entry.interior)
    if len({entry.batch for entry in used}) < 2:
        raise ValueError(
            f"the tried learning rates bracket the best one at {_batch_sizes(len({entry.batch for entry in used}))}, but a power law needs "
            f"two{_more_rates(left_out)}"
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
    """Return advice on rates that would bracket the other optima; empty if there are none."""
    edges = {entry.edge for entry in left_out}
    if edges <= {"lowest", "highest"}:
        return "; widen the range" if edges else ""
    return "; add learning rates around the best one"


def _batch_sizes(count: int) -> str:
    return f"{count or 'no'} batch size{'' if count == 1 else 's'}"
