"""Tests that learning rates, rules and batches are compared over the same seeds, and that the report says so."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_records import record, study, valley

from undula.study.findings import find
from undula.study.rates import at_batch, over_common_seeds, rate_points
from undula.study.seeds import common_seeds
from undula.study.trials import Measurement, State, TrialRecord
from undula.study.verdicts import untested_sentences

RATES = (0.01, 0.1, 1.0, 10.0, 100.0)
WORSE = 0.2
"""Difference of the losses of seed 1 from those of seed 0, at any rate."""


@pytest.mark.parametrize(
    ("found", "common"),
    [
        ([], ()),
        ([(), ()], ()),
        ([(0, 1), (1, 0)], (0, 1)),
        ([(0, 1), (0,), (0, 1)], (0,)),
        ([(0, 1, 2), (1, 2), (), (1,)], (1,)),
        ([(0,), (1,)], (0,)),
        ([(0,), (1, 2), (1, 2)], (1, 2)),
    ],
)
def test_the_seeds_of_most_results_are_compared(found: list[tuple[int, ...]], common: tuple[int, ...]) -> None:
    assert common_seeds(found) == common


@given(st.lists(st.sets(st.integers(0, 4)), max_size=6))
def test_all_results_with_the_first_seed_have_all_common_seeds(found: list[set[int]]) -> None:
    common = set(common_seeds(found))
    assert bool(common) == any(found)
    assert not common or any(all(common <= seeds for seeds in found if seed in seeds) for seed in common)


def with_seed_1(state: State, *finished: float, batch: int = 32) -> list[TrialRecord]:
    """Return trials of seed 0, and of seed 1 with a higher loss, which only the rates in `finished` have completed."""
    first = valley(batch, 1.0, RATES)
    second = [
        replace(each, state="complete" if each.lr in finished else state)
        for each in (record(batch, lr, 1 + np.log(lr) ** 2 + WORSE, seed=1) for lr in RATES)
    ]
    return [*first, *second]


@pytest.mark.parametrize("state", ["waiting", "running", "failed"])
def test_a_seed_that_only_the_best_rate_has_finished_does_not_make_it_worse(state: State) -> None:
    complete = at_batch(32, rate_points(valley(32, 1.0, RATES), 32), None)
    partial = at_batch(32, rate_points(with_seed_1(state, 1.0), 32), None)
    assert [point.loss for point in partial.points] == [point.loss for point in complete.points]
    assert partial.optimum == complete.optimum
    assert (partial.seeds, partial.left_out) == ((0,), (1,))


def test_the_report_names_the_seeds_that_are_not_compared() -> None:
    spec = study(batches=(32,), base_lrs=RATES, base_lr_range=None, target=None)
    sentences = untested_sentences(find(spec, with_seed_1("failed", 1.0)))
    assert [text for text in sentences if "seed 1" in text] == [
        "sgd, no warmup: seed 1 at batch 32, because not every learning rate has finished with it there; "
        "losses are compared over seed 0 only."
    ]
    whole = find(spec, with_seed_1("failed", *RATES))
    assert not any("seed 1" in text for text in untested_sentences(whole))
    assert whole.groups[0].main.batches[0].seeds == (0, 1)


def test_a_rate_without_the_compared_seed_has_no_loss() -> None:
    seed_0 = [replace(each, state="failed") if each.lr == 0.1 else each for each in valley(32, 1.0, RATES)]
    found = at_batch(32, rate_points([*seed_0, record(32, 0.1, 0.0, seed=1)], 32), None)
    assert [point.outcome for point in found.points] == ["complete", "failed", "complete", "complete", "complete"]
    assert found.left_out == (1,)
    assert found.lowest
    assert found.lowest.rate == 1.0


def test_the_first_loss_is_that_of_the_compared_seeds() -> None:
    """Seed 1 begins higher, so its first loss would make a rate that learned nothing look as if it had."""
    high = (Measurement(0, 0, 100.0), Measurement(320, 10, 50.0))
    learned_nothing = [
        replace(record(32, lr, 9.5), curve=(Measurement(0, 0, 9.0), Measurement(320, 10, 9.5))) for lr in RATES
    ]
    found = at_batch(32, rate_points([*learned_nothing, replace(record(32, 1.0, 50.0, seed=1), curve=high)], 32), None)
    assert found.optimum is None


def steps(batch: int, lr: float, seed: int, count: int) -> TrialRecord:
    """Return a trial that reaches a loss of 1 after `count` steps."""
    curve = (Measurement(0, 0, 2.0), Measurement(count * batch, count, 1.0))
    return replace(record(batch, lr, 1.0, seed=seed), curve=curve)


def test_steps_to_the_target_are_compared_over_common_seeds() -> None:
    spread = {0.1: 30, 1.0: 20, 10.0: 30}
    trials = [steps(32, lr, 0, count) for lr, count in spread.items()]
    found = at_batch(32, rate_points([*trials, steps(32, 1.0, 1, 60)], 32), 1.0).fewest
    assert found
    assert (found.rate, found.steps, found.seeds) == (1.0, (20.0,), (0,))


def fitted(batches: Sequence[int], slow: dict[tuple[int, int], int]) -> float:
    """Return the critical batch of S = 20 (1 + 200 / B), with the steps of some trials of seed 1 in `slow`."""
    spec = study(batches=tuple(batches), base_lrs=(0.1, 1.0, 10.0), base_lr_range=None, target=1.0)
    trials = [
        steps(batch, lr, 0, round(20 * (1 + 200 / batch)) + (lr != 1.0)) for batch in batches for lr in spec.base_lrs
    ]
    more = [steps(batch, lr, seed, count) for (batch, seed), count in slow.items() for lr in spec.base_lrs]
    pareto = find(spec, [*trials, *more]).groups[0].pareto
    assert pareto
    return pareto.critical_batch


def test_the_critical_batch_is_fitted_over_the_seeds_that_all_batches_have() -> None:
    batches = (50, 100, 200, 400, 800)
    assert fitted(batches, {(50, 1): 1000}) == fitted(batches, {})


def test_a_rule_and_the_tuned_rate_are_compared_over_common_seeds() -> None:
    one = at_batch(64, rate_points([*valley(64, 1.0, RATES), *valley(64, 1.0, RATES, seed=1)], 64), None)
    other = at_batch(64, rate_points(valley(64, 1.0, RATES), 64), None)
    assert [each.seeds for each in over_common_seeds([one, other])] == [(0,), (0,)]
    assert [each.seeds for each in over_common_seeds([one, one])] == [(0, 1), (0, 1)]
