"""Checks of the estimator of the gradient noise scale: its formulas, its averages, and the norms that it measures during training."""

from collections.abc import Iterator
from functools import partial
from math import sqrt

import numpy as np
import torch
from torch import nn

from undula.plan.noise import DECAY, NoiseScale, StepNorms
from undula.study.checks.rows import EXACT, Row
from undula.train.noise_scale import NoiseScaleMeter

KNOWN_NOISE_SCALE = 108.21
"""Noise scale, in samples, of the sampled gradients."""


def estimates(norms: StepNorms) -> tuple[float, float]:
    """Return the estimates of tr(Sigma) and |G|^2, or NaN if there are none."""
    return norms.estimates() or (float("nan"), float("nan"))


def scale(*norms: StepNorms) -> float:
    """Return the noise scale after some measurements, or NaN if there is none."""
    noise = NoiseScale()
    for measured in norms:
        noise = noise.after(measured)
    return float("nan") if noise.samples is None else noise.samples


def noise_scale() -> Iterator[Row]:
    """Check tr(Sigma) / |G|^2, estimated from the squared norms of small and large batches.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """
    yield from _sampled()
    # Two micro-batches of 4 and 12 samples, with E|g_i|^2 = |G|^2 + tr(Sigma) / b_i and |G|^2 = 3, tr(Sigma) = 24.
    uneven = StepNorms(4 / 16 * (3 + 24 / 4) + 12 / 16 * (3 + 24 / 12), 3 + 24 / 16, 2, 16)
    variance, squared = estimates(uneven)
    yield "|G|^2, uneven micro-batches", 3.0, squared, EXACT
    yield "tr(Sigma), uneven micro-batches", 24.0, variance, EXACT
    yield "noise scale after one measurement", 8.0, scale(uneven), EXACT
    # The second measurement has |G|^2 = 1 and tr(Sigma) = 32. Its weight is 1, and that of the first one is DECAY.
    later = StepNorms(1 + 32 / 8, 1 + 32 / 16, 2, 16)
    yield "noise scale after two measurements", (DECAY * 24 + 32) / (DECAY * 3 + 1), scale(uneven, later), EXACT
    yield "noise scale measured by autograd", 16 / 3, _measured(), EXACT


def _sampled() -> Iterator[Row]:
    rng = np.random.default_rng(2)
    dimensions, workers, small, steps = 50, 8, 16, 10_000
    gradient = np.full(dimensions, 1 / sqrt(dimensions))  # |G|^2 = 1
    spectrum = 1 / np.arange(1, dimensions + 1)
    spectrum *= KNOWN_NOISE_SCALE / spectrum.sum()
    of_small = of_large = 0.0
    for _ in range(10):
        draws = rng.standard_normal((steps // 10, workers, dimensions))
        gradients = gradient + np.sqrt(spectrum / small) * draws
        of_small += float(np.mean(np.sum(gradients**2, axis=-1))) / 10
        of_large += float(np.mean(np.sum(gradients.mean(axis=1) ** 2, axis=-1))) / 10
    norms = StepNorms(of_small, of_large, workers, workers * small)
    trace, square = estimates(norms)
    yield "|G|^2, sampled", 1.0, square, 0.02
    yield "tr(Sigma), sampled", KNOWN_NOISE_SCALE, trace, 0.02
    yield "noise scale, sampled", KNOWN_NOISE_SCALE, scale(norms), 0.02


def _measured() -> float:
    """Return the noise scale of a step with two micro-batches of 8 samples, whose mean gradients are (3, 0) and (1, 0).

    Therefore |G|^2 = (2 * 4 - 5) / 1 and tr(Sigma) = 16 (5 - 4) / 1, in the formulas of `StepNorms.estimates`.
    """
    weights, samples = nn.Parameter(torch.zeros(2, dtype=torch.float64)), 16
    meter = NoiseScaleMeter(1, watch=lambda show: weights.register_hook(partial(show, "the weights")))  # type: ignore[no-untyped-call]
    meter.begin_step(0, 1)
    for gradient in ((3.0, 0.0), (1.0, 0.0)):
        meter.begin_backward()
        (weights @ torch.tensor(gradient, dtype=torch.float64) * 8 / samples).backward()  # type: ignore[no-untyped-call]
        meter.end_micro_batch(8, 0)
    assert weights.grad is not None
    small, whole = sum(meter.small_squares(samples)), float(weights.grad.square().sum())
    scale = meter.keep(StepNorms(small, whole, 2, samples), clock=0.0)
    return float("nan") if scale is None else scale
