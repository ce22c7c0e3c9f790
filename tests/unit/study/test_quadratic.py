"""Tests of the noisy quadratic in closed form against known numbers and recursions."""

import numpy as np
import pytest

from undula.study.checks.quadratic import KNOWN_BEST, RATES, TARGET
from undula.study.quadratic import (
    NoisyQuadratic,
    momentum_moments,
    sgd_moment,
    sgd_steps,
    zhang_quadratic,
)


@pytest.fixture(scope="module")
def model() -> NoisyQuadratic:
    return zhang_quadratic()


@pytest.mark.parametrize("batch", KNOWN_BEST)
def test_the_known_steps_are_reproduced_exactly_with_their_epsilon(model: NoisyQuadratic, batch: int) -> None:
    steps = KNOWN_BEST[batch].steps
    rate = RATES[np.argmin(abs(RATES - KNOWN_BEST[batch].rate))]
    kept = (1 - rate * model.curvature) ** 2
    end = rate**2 * model.noise / batch / (1 - kept + 1e-8)

    def loss(step: int) -> float:
        return float(model.loss(end + (model.start - end) * kept**step))

    assert loss(steps) <= TARGET < loss(steps - 1)


def test_bins_contain_every_dimension(model: NoisyQuadratic) -> None:
    assert model.count.sum() == 10_000
    assert (model.curvature.min(), model.curvature.max()) == pytest.approx((1e-4, 1.0))


def test_the_closed_form_equals_the_recursion(model: NoisyQuadratic) -> None:
    rates, batch = np.array([0.3, 1.9]), 16.0
    moment = np.broadcast_to(model.start, (2, len(model.start)))
    for _ in range(500):
        rate = rates[:, None]
        moment = (1 - rate * model.curvature) ** 2 * moment + rate**2 * model.noise / batch
    assert sgd_moment(model, batch, rates, np.full(2, 500.0)) == pytest.approx(moment, rel=1e-10)


def test_the_search_finds_the_first_step_at_the_target(model: NoisyQuadratic) -> None:
    rate, batch = np.array([1.5]), 4096.0
    (steps,) = sgd_steps(model, batch, rate, 0.05)
    moment, walked = model.start, 0
    while model.loss(moment) > 0.05:
        moment = (1 - rate * model.curvature) ** 2 * moment + rate**2 * model.noise / batch
        walked += 1
    assert steps == walked


def test_rates_that_diverge_or_stay_above_the_target_take_infinitely_many_steps(model: NoisyQuadratic) -> None:
    assert np.isinf(sgd_steps(model, 4, np.array([0.5, 2.5]), TARGET)).all()


def test_momentum_of_zero_equals_sgd(model: NoisyQuadratic) -> None:
    rates, batch, steps = np.array([0.3, 1.9]), 256.0, 50
    moments = np.zeros((len(rates), len(model.start), 4, 1))
    moments[..., 0, 0], moments[..., 3, 0] = model.start, 1.0
    for _ in range(steps):
        moments = momentum_moments(model, batch, rates, 0.0) @ moments
    expected = sgd_moment(model, batch, rates, np.full(2, float(steps)))
    assert moments[..., 0, 0] == pytest.approx(expected, rel=1e-10)
