"""Tests of the order of an epoch by its properties: every sample once, in the same order on any machine."""

import tracemalloc
from collections import Counter
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undula.plan.order import EpochOrder, Window
from undula.plan.plan import LastStep, Plan, PlanSpec, Shuffle
from undula.plan.tree import assign

SHUFFLES: list[str] = list(get_args(Shuffle))
LAST_STEPS: list[str] = list(get_args(LastStep))


@st.composite
def orders(draw: st.DrawFn, last_steps: list[str] = LAST_STEPS) -> EpochOrder:
    virtual_workers = draw(st.integers(1, 6))
    row_counts = draw(st.lists(st.integers(0, 15), min_size=1, max_size=12))
    if sum(row_counts) < virtual_workers:
        row_counts.append(virtual_workers)
    global_batch = virtual_workers * draw(st.integers(1, 5))
    last_step = draw(st.sampled_from(last_steps))
    if last_step == "drop" and sum(row_counts) < global_batch:
        row_counts.append(global_batch)
    spec = PlanSpec(
        global_batch=global_batch,
        virtual_workers=virtual_workers,
        last_step=last_step,
        seed=draw(st.integers(-5, 2**70)),
        shuffle=draw(st.sampled_from(SHUFFLES)),
        window=draw(st.integers(1, 4)),
    )
    return EpochOrder(Plan(spec, sum(row_counts)), np.array(row_counts, dtype=np.int64), epoch=draw(st.integers(0, 3)))


def even(shuffle: str = "window", *, seed: int = 0, epoch: int = 0, row_groups: int = 40) -> EpochOrder:
    """Return an order with four virtual workers and row groups of 10 rows."""
    spec = PlanSpec(global_batch=8, virtual_workers=4, shuffle=shuffle, seed=seed)
    return EpochOrder(Plan(spec, 10 * row_groups), np.full(row_groups, 10, dtype=np.int64), epoch)


def stream(order: EpochOrder, virtual_worker: int) -> np.ndarray:
    """Return the ids that a virtual worker consumes in the epoch, step by step; shape [stream length]."""
    return np.concatenate([order.ids(step, virtual_worker) for step in range(order.plan.steps_per_epoch)])


def epoch_ids(order: EpochOrder) -> list[int]:
    """Return the ids of the epoch, ordered by virtual worker."""
    return [int(row) for v in range(order.plan.spec.virtual_workers) for row in stream(order, v)]


def window_ids(order: EpochOrder, window: Window) -> np.ndarray:
    """Return the ids of a window's rows in stream order, computed independently of the code under test."""
    first_ids = np.concatenate(([0], np.cumsum(order.row_counts)))
    ids = [first_ids[rows.row_group] + row for rows in window.ranges for row in range(rows.start, rows.stop)]
    return np.array(ids, dtype=np.int64)[window.permutation()]


@given(orders(["short"]))
def test_every_sample_of_an_epoch_is_consumed_exactly_once(order: EpochOrder) -> None:
    assert sorted(epoch_ids(order)) == list(range(order.plan.num_rows))


@given(orders(["drop"]))
def test_dropping_the_last_step_leaves_out_less_than_a_batch_and_repeats_nothing(order: EpochOrder) -> None:
    ids = epoch_ids(order)
    assert (
        len(set(ids)) == len(ids) == order.plan.num_rows // order.plan.spec.global_batch * order.plan.spec.global_batch
    )
    assert set(ids) <= set(range(order.plan.num_rows))


@given(orders(["wrap"]))
def test_wrapped_last_step_is_full_and_repeats_as_few_samples_as_it_must(order: EpochOrder) -> None:
    counts = Counter(epoch_ids(order))
    assert set(counts) == set(range(order.plan.num_rows))
    assert sum(counts.values()) == order.plan.steps_per_epoch * order.plan.spec.global_batch
    if order.plan.full_steps:
        assert max(counts.values()) <= 2
    for v in range(order.plan.spec.virtual_workers):
        consumed, length = stream(order, v), order.plan.stream_length(v)
        assert np.array_equal(consumed, np.resize(consumed[:length], len(consumed)))


def test_dropped_samples_differ_between_epochs() -> None:
    spec = PlanSpec(global_batch=64, virtual_workers=4, last_step="drop")
    plan, row_counts = Plan(spec, 100), np.full(10, 10, dtype=np.int64)
    consumed = [set(epoch_ids(EpochOrder(plan, row_counts, epoch))) for epoch in range(12)]
    assert set.union(*consumed) == set(range(100))


@given(orders(), st.data())
def test_the_shares_of_all_ranks_make_up_the_step_at_any_world_size(order: EpochOrder, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, order.plan.steps_per_epoch - 1))
    world_size = data.draw(st.integers(1, 9))
    ranks = assign(order.plan.spec.virtual_workers, world_size)
    assembled = [order.ids(step, v) for rank in ranks for v in rank]
    assert np.array_equal(np.concatenate(assembled), order.step_ids(step))


WORLD_SIZES = [1, 2, 3, 5, 8, 16, 60, 120]


@given(
    row_counts=st.lists(st.integers(0, 400), min_size=1, max_size=60),
    shuffle=st.sampled_from(SHUFFLES),
    last_step=st.sampled_from(["short", "wrap"]),
    seed=st.integers(0, 2**64),
    epoch=st.integers(0, 9),
    data=st.data(),
)
def test_a_step_of_960_samples_is_the_same_array_at_every_world_size(
    row_counts: list[int], shuffle: str, last_step: str, seed: int, epoch: int, data: st.DataObject
) -> None:
    row_counts = [*row_counts, 120]
    spec = PlanSpec(global_batch=960, virtual_workers=120, shuffle=shuffle, last_step=last_step, seed=seed)
    order = EpochOrder(Plan(spec, sum(row_counts)), np.array(row_counts, dtype=np.int64), epoch)
    step = data.draw(st.integers(0, order.plan.steps_per_epoch - 1))
    whole = order.step_ids(step)
    shares = [order.ids(step, v) for v in range(120)]
    for world_size in WORLD_SIZES:
        ranks = [np.concatenate([shares[v] for v in rank]) for rank in assign(120, world_size)]
        assert np.array_equal(np.concatenate(ranks), whole)


def test_the_order_of_a_billion_rows_needs_memory_for_its_row_groups_only() -> None:
    spec = PlanSpec(global_batch=960, virtual_workers=120)
    order = EpochOrder(Plan(spec, 10**9), np.full(10**5, 10**4, dtype=np.int64), epoch=3)
    tracemalloc.start()
    ids = [order.step_ids(step) for step in (0, 5 * 10**5, 10**6)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400 * 10**5  # 400 bytes per row group
    assert len(np.unique(np.concatenate(ids))) == 3 * 960


@given(orders())
def test_a_step_takes_the_next_rows_of_every_stream(order: EpochOrder) -> None:
    for v in range(order.plan.spec.virtual_workers):
        windows = [window_ids(order, window) for window in order.windows(v)]
        rows = np.concatenate(windows) if windows else np.zeros(0, dtype=np.int64)
        begin = 0
        for step in range(order.plan.steps_per_epoch):
            share = order.plan.share(step, v)
            assert np.array_equal(order.ids(step, v), rows[begin : begin + share])
            begin += share
        # If the last step wraps, its windows hold more rows than it takes.
        assert begin == len(rows) or (order.plan.spec.last_step == "wrap" and begin < len(rows))


@given(orders(), st.data())
def test_windows_from_a_position_are_the_remaining_windows_of_the_epoch(order: EpochOrder, data: st.DataObject) -> None:
    v = data.draw(st.integers(0, order.plan.spec.virtual_workers - 1))
    position = data.draw(st.integers(0, order.plan.consumed(v)))
    windows = list(order.windows(v))
    starts = [window.start for window in windows]
    assert starts == [sum(window.num_rows for window in windows[:number]) for number in range(len(windows))]
    later = list(order.windows(v, position))
    expected = [window for window in windows if window.start + window.num_rows > position]
    assert later == (expected if position < order.plan.consumed(v) else [])


@given(orders())
def test_windows_hold_at_least_one_and_at_most_the_configured_number_of_row_groups(order: EpochOrder) -> None:
    most = order.plan.spec.window if order.plan.spec.shuffle == "window" else 1
    for v in range(order.plan.spec.virtual_workers):
        for window in order.windows(v):
            assert 1 <= len(window.ranges) <= most
            assert all(0 <= rows.start < rows.stop <= order.row_counts[rows.row_group] for rows in window.ranges)


@given(orders(["short"]))
def test_a_row_group_is_read_once_more_for_each_cut_inside_it(order: EpochOrder) -> None:
    virtual_workers = range(order.plan.spec.virtual_workers)
    ranges = [part for v in virtual_workers for window in order.windows(v) for part in window.ranges]
    for row_group, rows in enumerate(order.row_counts):
        mine = sorted((part.start, part.stop) for part in ranges if part.row_group == row_group)
        bounds = [0, *(stop for _, stop in mine)]
        assert mine == list(pairwise(bounds))
        assert bounds[-1] == rows
    assert len(ranges) <= np.count_nonzero(order.row_counts) + len(virtual_workers) - 1


@given(orders(["short"]))
def test_a_row_group_shorter_than_every_stream_is_read_by_at_most_two_virtual_workers(order: EpochOrder) -> None:
    virtual_workers = range(order.plan.spec.virtual_workers)
    shortest = min(len(stream(order, v)) for v in virtual_workers)
    for row_group, rows in enumerate(order.row_counts):
        if rows <= shortest:
            readers = [
                v for v in virtual_workers for w in order.windows(v) for p in w.ranges if p.row_group == row_group
            ]
            assert len(readers) <= 2


@given(orders(["short"]))
def test_an_unshuffled_epoch_has_the_stored_order(order: EpochOrder) -> None:
    if order.plan.spec.shuffle == "none":
        assert epoch_ids(order) == list(range(order.plan.num_rows))


@given(orders(["short"]))
def test_rows_of_a_row_group_stay_in_order_unless_windows_are_shuffled(order: EpochOrder) -> None:
    if order.plan.spec.shuffle == "row_groups":
        first_ids = np.concatenate(([0], np.cumsum(order.row_counts)))
        ids = np.array(epoch_ids(order))
        owners = np.searchsorted(first_ids, ids, side="right") - 1
        for row_group in np.unique(owners):
            assert np.all(np.diff(ids[owners == row_group]) == 1)


@given(orders())
@settings(max_examples=20)
def test_the_order_is_a_function_of_its_arguments(order: EpochOrder) -> None:
    assert epoch_ids(EpochOrder(order.plan, order.row_counts.copy(), order.epoch)) == epoch_ids(order)


@pytest.mark.parametrize("shuffle", ["row_groups", "window"])
def test_each_epoch_and_seed_has_its_own_order(shuffle: str) -> None:
    several = [even(shuffle, seed=seed, epoch=epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(epoch_ids(order)) for order in several}) == 9


def test_the_window_shuffle_separates_neighbouring_rows() -> None:
    ids = np.array(epoch_ids(even(row_groups=100)))
    assert np.mean(np.diff(ids) == 1) < 0.05


def test_each_window_of_each_virtual_worker_has_its_own_key() -> None:
    order = even()
    keys = [window.key for v in range(4) for window in order.windows(v)]
    assert len(set(keys)) == len(keys) == 12


def test_the_order_does_not_depend_on_the_micro_batch_size() -> None:
    plans = [Plan(PlanSpec(global_batch=8, virtual_workers=4, micro_batch=size), 400) for size in (None, 1)]
    one, other = (epoch_ids(EpochOrder(plan, np.full(40, 10, dtype=np.int64), 0)) for plan in plans)
    assert one == other


def test_the_order_never_changes_between_versions() -> None:
    spec = PlanSpec(global_batch=6, virtual_workers=3, window=2, seed=7)
    order = EpochOrder(Plan(spec, 23), np.array([5, 4, 6, 3, 5]), epoch=2)
    assert [[order.ids(step, v).tolist() for v in range(3)] for step in range(4)] == [
        [[15, 7], [12, 21], [1, 13]],
        [[16, 8], [22, 9], [3, 4]],
        [[6, 17], [11, 10], [14, 2]],
        [[5, 18], [20, 19], [0]],
    ]
