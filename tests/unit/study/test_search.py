"""Tests of the trials that a study wants."""

from dataclasses import replace
from math import inf, log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.study.progress import StudyProgress
from undula.study.search import bracket, rate_at, wanted
from undula.study.spec import LogRange, StudySpec
from undula.study.trials import Measurement, State, Trial, TrialRecord

RANGE = LogRange(0.01, 1.0, 9)


def study(**keys: Any) -> StudySpec:
    keys = {"name": "s", "job": "job.yaml", "batches": (16, 64), "optimizers": ("sgd",), **keys}
    if "base_lrs" not in keys:
        keys.setdefault("base_lr_range", RANGE)
    return StudySpec(**keys)


def loss_of(trial: Trial) -> float:
    """Return a loss that is lowest at a rate that grows with the batch, and infinite above eight times that rate."""
    best = 0.002 * trial.batch
    return inf if trial.base_lr > 8 * best else log(trial.base_lr / best) ** 2


def test_a_grid_has_all_combinations_and_the_base_batch_once() -> None:
    spec = study(base_lrs=(0.1, 0.2), rules=("none", "linear"), seeds=(0, 1))
    trials = wanted(spec, {})
    assert len(trials) == len(set(trials)) == 2 * 2 * 3
    assert {(trial.batch, trial.rule) for trial in trials} == {(16, "none"), (64, "none"), (64, "linear")}
    assert {trial.seed for trial in trials[: len(trials) // 2]} == {0}, "half a grid has one seed of all combinations"


def test_different_trials_have_different_names() -> None:
    trials = wanted(study(rules=("none", "sqrt"), warmups=(0, 64), optimizers=("sgd", "adamw"), seeds=(0, 1)), {})
    assert len({trial.name for trial in trials}) == len(trials)


def test_a_random_search_is_repeatable_and_stays_in_its_range() -> None:
    spec = study(search="random", trials=20)
    trials = wanted(spec, {})
    assert trials == wanted(spec, {})
    assert len(set(trials)) == 20
    assert all(0.01 <= trial.base_lr <= 1 for trial in trials)
    small = study(base_lrs=(0.1, 0.2), search="random", trials=20)
    assert len(set(wanted(small, {}))) == len(wanted(small, {})) == 4, "a small grid is drawn once"


def test_a_larger_random_search_starts_with_the_smaller_one() -> None:
    for keys in ({"base_lrs": (0.1, 0.2, 0.3)}, {}):
        few, many = (wanted(study(search="random", trials=number, **keys), {}) for number in (3, 6))
        assert many[:3] == few


def test_a_widened_range_keeps_its_rates() -> None:
    assert set(LogRange(0.001, 0.1, 5).values()) < set(LogRange(0.0001, 1.0, 9).values())
    assert LogRange(0.001, 0.1, 5).values() == (0.001, 0.00316228, 0.01, 0.0316228, 0.1)


def run_adaptively(spec: StudySpec, number_at_once: int) -> dict[Trial, float]:
    losses: dict[Trial, float] = {}
    while todo := [trial for trial in wanted(spec, losses) if trial not in losses]:
        losses |= {trial: loss_of(trial) for trial in todo[:number_at_once]}
    return losses


@given(st.integers(1, 7), st.sampled_from([(2, 4), (16, 64), (400, 8000)]))
def test_an_adaptive_search_brackets_the_optimum_and_does_not_depend_on_the_order(
    number_at_once: int, batches: tuple[int, int]
) -> None:
    spec = study(search="adaptive", trials=60, batches=batches)
    losses = run_adaptively(spec, number_at_once)
    assert losses == run_adaptively(spec, 100)
    for batch in batches:
        found = {trial.base_lr: loss for trial, loss in losses.items() if trial.batch == batch}
        rates = sorted(found)
        assert rates[0] < min(found, key=lambda rate: found[rate]) < rates[-1]


def test_an_adaptive_search_never_exceeds_its_trials() -> None:
    losses = run_adaptively(study(search="adaptive", trials=5, seeds=(0, 1), batches=(8000, 16000)), 100)
    trained = [sum(trial.batch == batch for trial in losses) for batch in (8000, 16000)]
    assert [0 < number <= 5 for number in trained] == [True, True]


def test_an_adaptive_search_waits_for_a_failed_trial_at_its_batch_only() -> None:
    """The user may fix the script, and a rate without a result is not a bad one."""
    progress = StudyProgress(study(search="adaptive", trials=60, batches=(16, 64)))
    while todo := [trial for trial in progress.wanted() if trial not in progress.records]:
        for trial in todo:
            state: State = "failed" if trial.batch == 16 else "complete"
            curve = (Measurement(0, 0, 1e9), Measurement(9, 9, loss_of(trial)))
            progress.records[trial] = TrialRecord(trial, state, trial.base_lr, curve)
    trained = [trial.batch for trial in progress.records]
    assert trained.count(16) == 3
    assert trained.count(64) > 3
    for trial, record in progress.records.items():
        progress.records[trial] = replace(record, state="complete")
    assert len(progress.wanted()) > len(trained)


def test_an_adaptive_search_trains_rules_that_share_a_curve_once() -> None:
    spec = study(search="adaptive", trials=9, rules=("none", "legw", "linear", "adascale"), warmups=(0, 64))
    first = {(trial.warmup, trial.batch, trial.rule) for trial in wanted(spec, {})}
    assert {(batch, rule) for warmup, batch, rule in first if not warmup} == {
        (16, "none"), (64, "none"), (64, "adascale"),
    }  # fmt: skip
    assert {rule for warmup, batch, rule in first if warmup and batch == 64} == {"none", "legw", "adascale"}
    own_first = wanted(study(search="adaptive", trials=9, rules=("legw", "none", "linear"), warmups=(64,)), {})
    assert {(trial.batch, trial.rule) for trial in own_first} == {(16, "legw"), (64, "legw"), (64, "none")}


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
@pytest.mark.parametrize("behind", ["complete", "stopped"])
def test_an_adaptive_search_leaves_a_plateau_where_nothing_learns(seeds: tuple[int, ...], behind: State) -> None:
    """On the plateau, the lowest loss is due to chance, and so are the stops of ASHA."""
    progress = StudyProgress(study(search="adaptive", trials=60, batches=(20_000,), seeds=seeds))
    while todo := [trial for trial in progress.wanted() if trial not in progress.records]:
        for trial in todo:
            chance = -0.1 if trial.seed else 0.2
            has_learned = (loss := loss_of(trial)) < 2
            curve = (Measurement(0, 0, 2.5), Measurement(9, 9, loss if has_learned else 2.5 + chance))
            state = "complete" if has_learned or not progress.records else behind
            progress.records[trial] = TrialRecord(trial, state, trial.base_lr, curve)
    complete = [record for record in progress.records.values() if record.state == "complete"]
    assert 30 < min(complete, key=lambda record: record.last_loss).lr < 50


@given(st.integers(-40, 40), st.integers(1, 12), st.integers(1, 6))
def test_a_search_where_nothing_learns_widens_on_both_sides(lowest: int, width: int, stride: int) -> None:
    places: list[int] = []

    def known(place: int) -> float:
        return inf if place > lowest + 2 * width else min(abs(place - lowest) / width, 1.0)

    def loss(place: int) -> float | None:
        return known(place) if len(places) < 500 else None

    for place in bracket(loss, stride, lambda place: known(place) == 1):
        places.append(place)
    assert len(places) == len(set(places))
    assert stride > width or lowest in places


def test_a_search_tries_rates_between_idle_and_diverged_ones() -> None:
    places = list(bracket(lambda place: inf if place > 3 else float(place != 3), 4, lambda place: place < 3))
    assert 3 in places


def test_the_lattice_has_the_rates_of_the_range() -> None:
    rates = [rate_at(RANGE, place) for place in range(-4, 5)]
    assert all(abs(mine / theirs - 1) < 1e-3 for mine, theirs in zip(rates, RANGE.values(), strict=True))


@given(st.integers(-50, 50), st.integers(1, 16))
def test_a_search_ends_at_a_place_that_its_neighbours_bracket(lowest: int, stride: int) -> None:
    places = list(bracket(lambda place: abs(place - lowest), stride))
    assert {lowest - 1, lowest, lowest + 1} <= set(places)
    assert len(places) == len(set(places))


def test_a_search_where_everything_diverges_tries_lower_rates() -> None:
    places = list(bracket(lambda place: inf if place > -20 else -place, 4))
    assert {-21, -20, -19} <= set(places)
