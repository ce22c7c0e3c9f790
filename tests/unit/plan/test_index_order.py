"""Tests of the order over indices by its properties: every sample once, permuted as a whole, any position at once."""

from collections import Counter
from typing import get_args

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from undula.plan.order import IndexOrder
from undula.plan.plan import LastStep, Plan, PlanSpec

LAST_STEPS: list[str] = list(get_args(LastStep))
FOURTH_STEP = [48, 36, 1, 19, 65, 5, 52, 47, 82, 42, 14, 40]
"""Samples of the fourth step of `of_size(103)`."""


@st.composite
def orders(draw: st.DrawFn, last_steps: list[str] = LAST_STEPS) -> IndexOrder:
    virtual_workers = draw(st.integers(1, 6))
    global_batch = virtual_workers * draw(st.integers(1, 5))
    last_step = draw(st.sampled_from(last_steps))
    spec = PlanSpec(
        global_batch=global_batch,
        virtual_workers=virtual_workers,
        last_step=last_step,
        seed=draw(st.integers(-5, 2**70)),
        shuffle=draw(st.sampled_from(["none", "window"])),
    )
    rows = draw(st.integers(global_batch if last_step == "drop" else virtual_workers, 120))
    return IndexOrder(Plan(spec, rows), draw(st.integers(0, 3)))


def of_size(
    rows: int, *, seed: int = 0, epoch: int = 0, virtual_workers: int = 4, shuffle: str = "window"
) -> IndexOrder:
    spec = PlanSpec(global_batch=12, virtual_workers=virtual_workers, seed=seed, shuffle=shuffle)
    return IndexOrder(Plan(spec, rows), epoch)


def epoch_ids(order: IndexOrder) -> list[int]:
    return [int(row) for step in range(order.plan.steps_per_epoch) for row in order.step_ids(step)]


@given(orders(["short"]))
def test_every_sample_of_an_epoch_is_consumed_exactly_once(order: IndexOrder) -> None:
    assert sorted(epoch_ids(order)) == list(range(order.plan.num_rows))


@given(orders(["drop"]))
def test_dropping_the_last_step_repeats_nothing(order: IndexOrder) -> None:
    ids = epoch_ids(order)
    assert len(set(ids)) == len(ids) == order.plan.samples_per_epoch
    assert set(ids) <= set(range(order.plan.num_rows))


@given(orders(["wrap"]))
def test_a_wrapped_last_step_is_full_and_repeats_the_first_samples_of_the_epoch(order: IndexOrder) -> None:
    ids, rows = epoch_ids(order), order.plan.num_rows
    assert len(ids) % order.plan.spec.global_batch == 0
    assert Counter(ids[:rows]) == Counter(range(rows))
    assert ids[rows:] == [ids[place % rows] for place in range(len(ids) - rows)]


@given(orders())
def test_virtual_workers_share_a_step_in_order(order: IndexOrder) -> None:
    for step in range(order.plan.steps_per_epoch):
        parts = [order.ids(step, v) for v in range(order.plan.spec.virtual_workers)]
        assert [len(part) for part in parts] == [order.plan.share(step, v) for v in range(len(parts))]
        assert np.concatenate(parts).tolist() == order.step_ids(step).tolist()


def test_a_step_has_the_same_samples_for_any_number_of_virtual_workers() -> None:
    for step in range(9):
        assert of_size(103).step_ids(step).tolist() == of_size(103, virtual_workers=12).step_ids(step).tolist()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [epoch_ids(of_size(103, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(ids) for ids in orders}) == 4
    assert epoch_ids(of_size(103, shuffle="none", epoch=3)) == list(range(103))


def test_an_epoch_is_permuted_as_a_whole() -> None:
    """Each tenth of an epoch has samples from everywhere: their mean index is that of the whole within six standard errors."""
    rows = 12_000
    tenths = np.array(epoch_ids(of_size(rows))).reshape(10, -1)
    error = rows / 12**0.5 / (rows / 10) ** 0.5
    assert np.abs(tenths.mean(axis=1) - rows / 2).max() < 6 * error
    assert (tenths.max(axis=1) > 0.9 * rows).all()
    assert (tenths.min(axis=1) < 0.1 * rows).all()


def test_the_order_never_changes() -> None:
    """A run must find the order of the version that began it."""
    assert of_size(103).step_ids(3).tolist() == FOURTH_STEP
    assert of_size(2**40).step_ids(2**30).max() < 2**40
