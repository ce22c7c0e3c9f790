"""Noisy quadratic model: the expected loss of SGD and of heavy-ball momentum, computed without training. Pure.

The model is from Zhang et al. 2019, arXiv:1907.04164, section 3: dimension i has curvature h_i, and its gradient is h_i x_i plus noise of
variance c_i / B. Therefore the second moments after a step follow from those before it. The loss is the sum 1/2 sum h_i E[x_i^2]
over dimensions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

MAX_STEPS = 2**40
"""Number of steps after which a target counts as never reached."""


@dataclass(frozen=True)
class NoisyQuadratic:
    """Quadratic with dimensions grouped into bins, in which all dimensions are equal. All arrays have the shape [bins]."""

    count: Floats
    """Number of dimensions in each bin."""
    curvature: Floats
    """Curvature h."""
    noise: Floats
    """Variance c of the gradient of one sample, in one dimension."""
    start: Floats
    """Second moment E[x^2] before the first step."""

    def loss(self, second_moment: Floats) -> Floats:
        """Return the expected loss 1/2 sum h E[x^2]; `second_moment` has the shape [..., bins]."""
        found: Floats = 0.5 * np.sum(self.count * self.curvature * second_moment, axis=-1)
        return found


@dataclass(frozen=True)
class Best:
    """Learning rate of a grid that takes the fewest steps to a target. The steps are infinite if no rate reaches it."""

    steps: float
    rate: float


def zhang_quadratic(dimensions: int = 10_000, points: int = 100) -> NoisyQuadratic:
    """Return the model of the paper, which has h_i = 1/i, c = h, and E[x^2] = 1 at the start.

    Each h_i is rounded down to one of `points` values that are spaced geometrically from 1 / dimensions to 1, with both ends included.
    Values without a dimension are dropped (84 of 100 remain). With a target of 0.01, this model takes 8,118 steps at a batch of 4096. The
    mean of each bin in place of its lower end would give 7,864 steps, and the model without bins 7,870.
    """
    grid = np.geomspace(1 / dimensions, 1, points)
    h = 1 / np.arange(1, dimensions + 1)
    # The factor keeps rounding errors from moving h = 1 / dimensions below the grid, or h = 1 below its top.
    count = np.bincount(np.digitize(h * (1 + 1e-12), grid) - 1, minlength=points).astype(np.float64)
    held = count > 0
    return NoisyQuadratic(count[held], grid[held], grid[held], np.ones(int(held.sum())))


def sgd_moment(model: NoisyQuadratic, batch: float, rates: Floats, steps: Floats) -> Floats:
    """Return E[x^2] after a number of steps of SGD; `rates` and `steps` have the shape [rates], and the result has [rates, bins].

    E[x^2](t + 1) = (1 - eta h)^2 E[x^2](t) + eta^2 c / B is a geometric series. It approaches eta c / (B h (2 - eta h)) as
    (1 - eta h)^2t approaches 0. This holds for eta h < 2.
    """
    rate, h = rates[:, None], model.curvature
    end = rate * model.noise / (batch * h * (2 - rate * h))
    moment: Floats = end + (model.start - end) * (1 - rate * h) ** (2 * steps[:, None])
    return moment


def sgd_steps(model: NoisyQuadratic, batch: float, rates: Floats, target: float) -> Floats:
    """Return the steps of SGD until the expected loss is at most the target, or infinity if it never is; shape [rates].

    The steps are found by bisection on the closed form. This requires that the loss always falls, which is the case if no dimension has
    more stationary noise than its start.
    """
    steps = np.full(len(rates), np.inf)
    stable = np.flatnonzero(rates * model.curvature.max() < 2)
    rates = rates[stable]
    low, high = np.zeros(len(rates)), np.full(len(rates), float(MAX_STEPS))
    reached = model.loss(sgd_moment(model, batch, rates, high)) <= target
    while np.any(high - low > 1):
        middle = np.floor((low + high) / 2)
        above = model.loss(sgd_moment(model, batch, rates, middle)) > target
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    steps[stable] = np.where(reached, high, np.inf)
    return steps


def momentum_moments(model: NoisyQuadratic, batch: float, rates: Floats, momentum: float) -> Floats:
    """Return the exact matrices of one step of heavy-ball momentum on (E[x^2], E[xv], E[v^2], 1), with the shape [rates, bins, 4, 4].

    The step is torch's: v <- momentum v + gradient, x <- x - rate v. With a = 1 - rate h, momentum m and noise variance s = c / B,
    x' = a x - rate m v - rate noise and v' = h x + m v + noise. The rows are the expectations of their squares and their product.
    """
    rate, h = np.broadcast_arrays(rates[:, None], model.curvature)
    noise = np.broadcast_to(model.noise / batch, h.shape)
    kept, one, zero = 1 - rate * h, np.ones_like(h), np.zeros_like(h)
    m = momentum
    rows = (
        (kept**2, -2 * kept * rate * m, (rate * m) ** 2, rate**2 * noise),
        (kept * h, m * (kept - rate * h), -rate * m**2, -rate * noise),
        (h**2, 2 * m * h, m**2 * one, noise),
        (zero, zero, zero, one),
    )
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def best_of(steps: Floats, rates: Floats) -> Best:
    """Return the fewest steps and their learning rate. If several rates take as few steps, it is the first."""
    least = int(np.argmin(steps))
    return Best(float(steps[least]), float(rates[least]))
