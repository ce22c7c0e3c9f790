"""Tests of the gradient noise scale on gradients with a known covariance."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.plan.noise import Measured, NoiseScale, StepNorms

MEAN = [1.0, -0.5, 0.25, 0.0]
DEVIATIONS = [3.0, 1.0, 2.0, 0.5]
VARIANCE = sum(deviation**2 for deviation in DEVIATIONS)  # tr(Sigma) = 14.25
SQUARED = sum(value**2 for value in MEAN)  # |G|^2 = 1.3125; B_noise = 10.857


def norms(source: random.Random, shares: list[int]) -> StepNorms:
    """Return the norms of a step with Gaussian gradients, as of a quadratic with noisy targets.

    `shares` are the sizes of its micro-batches in samples.
    """
    samples = sum(shares)
    means = [
        [source.gauss(mean, deviation / math.sqrt(share)) for mean, deviation in zip(MEAN, DEVIATIONS, strict=True)]
        for share in shares
    ]
    whole = [
        sum(share * mean[place] for share, mean in zip(shares, means, strict=True)) / samples for place in range(4)
    ]
    small = sum(share * sum(x**2 for x in mean) for share, mean in zip(shares, means, strict=True)) / samples
    return StepNorms(small, sum(x**2 for x in whole), len(shares), samples)


@pytest.mark.parametrize("shares", [[8] * 4, [8, 8, 7, 1], [1] * 32])
def test_estimates_are_unbiased_for_any_sizes_of_micro_batches(shares: list[int]) -> None:
    source = random.Random(0)
    drawn = [norms(source, shares).estimates() for _ in range(20_000)]
    variances, squares = zip(*(estimate for estimate in drawn if estimate), strict=True)
    assert len(variances) == 20_000
    assert sum(variances) / 20_000 == pytest.approx(VARIANCE, rel=0.03)
    assert sum(squares) / 20_000 == pytest.approx(SQUARED, rel=0.03)


def test_separate_averages_converge_to_the_noise_scale() -> None:
    source = random.Random(1)
    scales, noise = [], NoiseScale()
    for number in range(20_000):
        noise = noise.after(norms(source, [4] * 8))
        if number % 1000 == 999:
            assert noise.samples is not None
            scales.append(noise.samples)
    assert sum(scales) / len(scales) == pytest.approx(VARIANCE / SQUARED, rel=0.1)
    assert all(scale == pytest.approx(VARIANCE / SQUARED, rel=0.6) for scale in scales)


@given(st.integers(1, 400))
def test_averages_are_not_biased_towards_their_initial_zero(steps: int) -> None:
    noise = NoiseScale()
    for _ in range(steps):
        noise = noise.after(StepNorms(small_squared=3.0, whole_squared=1.5, micro_batches=4, samples=16))
    assert noise.variance / noise.weight == pytest.approx(16 * 1.5 / 3)
    assert noise.squared / noise.weight == pytest.approx((4 * 1.5 - 3) / 3)
    assert noise.samples == pytest.approx(8.0)


def test_steps_without_an_estimate_change_nothing() -> None:
    noise = NoiseScale(1.0, 1.0, 0.5)
    assert noise.after(StepNorms(3.0, 1.0, 1, 16)) is noise
    assert noise.after(StepNorms(math.nan, 1.0, 4, 16)) is noise
    assert noise.after(StepNorms(3.0, math.inf, 4, 16)) is noise
    assert NoiseScale().samples is None


def test_pure_noise_has_an_infinite_scale_and_a_gradient_without_noise_a_scale_of_zero() -> None:
    assert NoiseScale(1.0, -0.1, 0.5).samples == math.inf
    assert NoiseScale(-1.0, 0.1, 0.5).samples == 0.0
    assert NoiseScale(-1.0, -0.1, 0.5).samples == 0.0


def test_measurements_survive_a_checkpoint() -> None:
    measured = Measured(NoiseScale(0.1, 0.2, 0.3), 64.5)
    assert Measured.of(*measured.values()) == measured
