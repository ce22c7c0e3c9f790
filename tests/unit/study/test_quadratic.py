"""Tests of the noisy quadratic in closed form against known numbers and recursions."""

import numpy as np
import pytest

from undula.study.checks.quadratic import KNOWN_BEST, RATES, TARGET
from undula.study.quadratic import (
    NoisyQuadratic,
    best_of,
    momentum_moments,
    momentum_steps,
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
    assert np.isinf(momentum_steps(model, 4, np.array([0.5, 4.5]), TARGET, 0.9)).all()


def test_momentum_of_zero_equals_sgd(model: NoisyQuadratic) -> None:
    rates = RATES[40:90:7]
    assert momentum_steps(model, 256, rates, TARGET, 0.0).tolist() == sgd_steps(model, 256, rates, TARGET).tolist()


def test_the_momentum_search_ends_where_the_loss_crosses_the_target(model: NoisyQuadratic) -> None:
    rate, momentum, batch = np.array([0.2]), 0.9, 1024.0
    (steps,) = momentum_steps(model, batch, rate, TARGET, momentum)
    step = momentum_moments(model, batch, rate, momentum)[0]
    moments = np.zeros((len(model.start), 4, 1))
    moments[:, 0, 0], moments[:, 3, 0] = model.start, 1.0
    losses = []
    for _ in range(int(steps)):
        moments = step @ moments
        losses.append(model.loss(moments[:, 0, 0]))
    assert losses[-1] <= TARGET < losses[-2]


def test_momentum_saves_steps_only_at_large_batches(model: NoisyQuadratic) -> None:
    """According to Zhang et al. 2019, momentum increases the critical batch."""
    momentum = 0.9
    gains = []
    for batch in (32, 4096):
        plain = best_of(sgd_steps(model, batch, RATES, TARGET), RATES).steps
        rates = np.append(RATES * (1 - momentum), RATES[RATES > 0.3])
        gains.append(plain / best_of(momentum_steps(model, batch, rates, TARGET, momentum), rates).steps)
    assert gains[0] == pytest.approx(1.0, abs=0.1)
    assert gains[1] > 2
