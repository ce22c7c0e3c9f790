"""Tests of the fits: they are exact on exact data, and their intervals have the right confidence otherwise."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undula.study.fits import (
    APART,
    Edge,
    Floats,
    Optimum,
    about_lowest,
    best_rate,
    fit_pareto,
    fit_power_law,
)

BATCHES = (16, 32, 64, 128, 256, 512, 1024)


def optima(batches: Sequence[float], rates: Sequence[float]) -> list[Optimum]:
    return [Optimum(batch, rate, 0.0, None) for batch, rate in zip(batches, rates, strict=True)]


@settings(max_examples=30, deadline=None)
@given(fewest=st.floats(10, 1e6), critical=st.floats(1, 1e5))
def test_pareto_fit_recovers_exact_data(fewest: float, critical: float) -> None:
    fit = fit_pareto(BATCHES, [fewest * (1 + critical / batch) for batch in BATCHES], resamples=20)
    assert fit.critical_batch == pytest.approx(critical, rel=1e-4)
    assert fit.fewest_steps == pytest.approx(fewest, rel=1e-4)
    assert fit.fewest_samples == pytest.approx(fewest * critical, rel=1e-4)


@pytest.mark.parametrize(("batches", "draws", "low", "high"), [
    (np.repeat(BATCHES, 3), 100, 88, 99), *((32 * 2.0 ** np.arange(count), 60, 53, 60) for count in (4, 5, 7)),
])  # fmt: skip
def test_the_interval_of_the_critical_batch_has_its_confidence(
    batches: Floats, draws: int, low: int, high: int
) -> None:
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(draws):
        steps = 500 * (1 + 200 / batches) * np.exp(0.1 * rng.standard_normal(len(batches)))
        held += fit_pareto(batches.tolist(), steps.tolist(), resamples=200, seed=seed).interval.holds(200)
    assert low <= held <= high


def test_the_interval_is_open_on_a_side_that_the_batches_do_not_bound() -> None:
    rng = np.random.default_rng(1)
    noise = np.exp(0.2 * rng.standard_normal(len(BATCHES)))
    small = fit_pareto(BATCHES, (1e9 / np.array(BATCHES) * noise).tolist())
    assert not small.inside
    assert small.interval.high == np.inf
    large = fit_pareto(BATCHES, (1000 * noise).tolist())
    assert not large.inside
    assert large.interval.low == 0
    assert fit_pareto(BATCHES, [1000 * (1 + 100 / batch) for batch in BATCHES]).inside


def test_trials_that_never_reached_the_target_are_left_out() -> None:
    steps = [1000 * (1 + 100 / batch) for batch in BATCHES]
    assert fit_pareto([*BATCHES, 2048], [*steps, np.inf]).critical_batch == pytest.approx(100, rel=1e-4)
    with pytest.raises(ValueError, match="2 batch sizes reached the target, but a critical batch needs three"):
        fit_pareto([1, 2, 2, 4], [9.0, 8.0, 8.5, np.inf])


@settings(max_examples=50, deadline=None)
@given(exponent=st.floats(-2, 2), factor=st.floats(1e-6, 10))
def test_power_law_recovers_exact_data(exponent: float, factor: float) -> None:
    fit = fit_power_law(optima(BATCHES, [factor * batch**exponent for batch in BATCHES]))
    assert fit.exponent == pytest.approx(exponent, abs=1e-9)
    assert fit.factor == pytest.approx(factor, rel=1e-6)
    assert fit.interval.holds(exponent)
    assert not fit.interval.holds(exponent + 1e-3), "an exact line rejects every other exponent"


def test_the_interval_of_the_exponent_has_its_confidence() -> None:
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(1000):
        rates = 0.01 * np.sqrt(BATCHES) * np.exp(0.3 * rng.standard_normal(len(BATCHES)))
        held += fit_power_law(optima(BATCHES, rates.tolist())).interval.holds(0.5)
    assert 930 <= held <= 970


def test_optima_at_the_edge_are_bounds_and_not_fitted() -> None:
    inside = optima(BATCHES, [0.001 * batch for batch in BATCHES])
    edge = Optimum(2048, 0.1, 0.0, "highest")
    fit = fit_power_law([*inside, edge])
    assert (fit.exponent, fit.left_out) == (pytest.approx(1.0), (edge,))
    with pytest.raises(ValueError, match=r"at 1 batch size, but a power law needs two; widen the range"):
        fit_power_law([inside[0], edge])
    with pytest.raises(ValueError, match=r"a power law needs two; add learning rates around the best one"):
        fit_power_law([inside[0], replace(edge, edge="diverged")])
    with pytest.raises(ValueError, match=r"a power law needs two$"):
        fit_power_law([inside[0]])


def test_an_optimum_next_to_divergence_is_not_below_the_measured_losses() -> None:
    found = best_rate(512, [0.03, 0.05, 0.07], [0.22, 0.21, 2.5])
    assert found.interior
    assert 0.21 <= found.loss < 0.22


@settings(max_examples=50, deadline=None)
@given(best=st.floats(-4, -1), curvature=st.floats(0.01, 10), floor=st.floats(-5, 5))
def test_the_optimum_of_a_parabola_is_found_between_the_rates(best: float, curvature: float, floor: float) -> None:
    rates = np.logspace(-5, 0, 21)
    losses = floor + curvature * (np.log10(rates) - best) ** 2
    found = best_rate(64, rates.tolist(), losses.tolist())
    assert found.interior
    assert np.log10(found.rate) == pytest.approx(best, abs=1e-3)
    assert found.loss == pytest.approx(np.interp(np.log(found.rate), np.log(rates), losses))


@settings(max_examples=100, deadline=None)
@given(
    best=st.floats(-2.5, -1.5),
    copy=st.floats(1.001, 1.2),
    noise=st.lists(st.floats(-0.02, 0.02), min_size=14, max_size=14),
)
def test_nearly_equal_rates_do_not_move_the_optimum(best: float, copy: float, noise: list[float]) -> None:
    """Two rules can give nearly equal rates. A parabola through two such rates would follow their noise."""
    rates = np.sort(np.concatenate([grid := np.logspace(-4, 0, 7), grid * copy]))
    losses = 1 + 0.5 * (np.log10(rates) - best) ** 2 + np.array(noise)
    found = best_rate(64, rates.tolist(), losses.tolist())
    assert found.interior
    assert abs(np.log10(found.rate) - best) < 0.5
    assert found.loss > losses.min() - 0.1


def test_a_grid_with_the_minimum_ratio_uses_one_neighbour_on_each_side() -> None:
    rates = [0.01 * APART**step for step in range(12)]
    spans = [about_lowest(rates, at, [False] * 12)[0] for at in range(1, 11)]
    assert [(each.start, each.stop) for each in spans] == [(at - 1, at + 2) for at in range(1, 11)]


def test_without_a_parabola_the_optimum_lies_anywhere_between_its_neighbours() -> None:
    concave = best_rate(64, [0.1, 0.19, 0.2, 0.21, 0.4], [1.0, 3.0, 0.9, 3.0, 1.0])
    assert (concave.rate, concave.loss, concave.edge) == (0.2, 0.9, None)
    assert concave.open == pytest.approx(np.log(4) / 4)
    outside = best_rate(64, [0.1, 0.19, 0.2, 0.4], [1.0, 3.0, 0.99, 2.0])
    assert (outside.rate, outside.open > 0) == (0.2, True)
    assert best_rate(64, [0.1, 0.2, 0.4], [2.0, 1.0, 2.0]).open == 0


def test_a_bound_has_the_side_on_which_the_best_rate_is() -> None:
    edges: list[tuple[Edge | None, str | None]] = [
        ("lowest", "≤"), ("highest", "≥"), ("diverged", "≥"), ("alone", "~"), (None, None),
    ]  # fmt: skip
    assert [Optimum(64, 0.1, 1.0, edge).bound for edge, _ in edges] == [bound for _, bound in edges]


def test_a_nearly_equal_rate_does_not_bracket_the_lowest_loss() -> None:
    assert best_rate(64, [0.098, 0.1, 0.2, 0.4], [1.01, 1.0, 2.0, 3.0]).edge == "lowest"
    assert best_rate(64, [0.1, 0.2, 0.4, 0.41], [3.0, 2.0, 1.0, 1.01]).edge == "highest"
    assert best_rate(64, [0.1, 0.2, 0.21], [1.0, 0.5, np.inf]).edge == "diverged"
    assert best_rate(64, [0.19, 0.2, 0.4], [0.6, 0.5, np.inf]).edge == "alone"
    assert best_rate(64, [0.1], [1.0]).edge == "alone"
    assert best_rate(64, [0.1, 0.11, 0.12], [2.0, 1.0, 2.0]).interior, "the range can be narrow"
    assert best_rate(64, [0.1, 0.2, 2.0], [2.0, 1.0, 2.0]).interior, "the steps can be wide"


@pytest.mark.parametrize(
    ("losses", "rate", "edge"),
    [
        ([1.0, 2.0, 3.0, 4.0], 0.1, "lowest"),
        ([4.0, 3.0, 2.0, 1.0], 0.8, "highest"),
        ([4.0, 3.0, 2.0, np.inf], 0.4, "diverged"),
        ([4.0, 3.0, 2.0, np.nan], 0.4, "diverged"),
        ([3.0, 2.0, 2.0, 3.0], np.sqrt(0.2 * 0.4), None),
        ([np.inf, 2.0, 3.0, 4.0], 0.2, "alone"),
        ([np.inf, 2.0, np.inf, np.inf], 0.2, "alone"),
        ([2.0, 2.0, 2.0, 3.0], 0.1, "lowest"),
    ],
)
def test_an_optimum_has_the_edge_on_which_it_lies(losses: list[float], rate: float, edge: str | None) -> None:
    for step in (1, -1):  # the order of the rates does not matter
        found = best_rate(64, [0.1, 0.2, 0.4, 0.8][::step], losses[::step])
        assert (found.rate, found.edge) == (pytest.approx(rate), edge)


def test_rates_that_all_diverged_are_refused() -> None:
    with pytest.raises(ValueError, match="every learning rate diverged at batch 64; add lower ones"):
        best_rate(64, [0.1, 0.2], [np.nan, np.inf])
