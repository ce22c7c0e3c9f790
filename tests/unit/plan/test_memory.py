"""Tests of the arithmetic of memory."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.plan.memory import (
    Division,
    PassCount,
    StateCount,
    extrapolated,
    held_gradients,
)
from undula.plan.step_memory import moments, peak
from undula.plan.work import Work

STATE = StateCount(
    parameters=1000,
    trainable=1000,
    parameter_bytes=4000,
    buffer_bytes=10,
    other_bytes=20,
    gradient_bytes=4000,
    largest_bytes=4000,
    optimizer_bytes=8000,
    update_bytes=500,
    update_moved_bytes=20_000,
)
PASSES = PassCount(
    samples=4,
    batch_bytes=100,
    saved_bytes=10_000,
    forward_bytes=11_000,
    first_bytes=12_000,
    later_bytes=11_500,
    work=Work(flops=10, moved_bytes=10, operations=5),
)


@pytest.mark.parametrize(("virtual_workers", "most"), [(1, 1), (2, 2), (4, 3), (8, 4), (16, 5)])
def test_a_rank_alone_holds_as_many_gradients_as_the_tree_is_deep(virtual_workers: int, most: int) -> None:
    held = held_gradients(virtual_workers, 1, 0)
    assert max(held.kept + waiting + 1 for waiting in held.open) == most


def test_a_single_virtual_worker_keeps_a_sum_only_to_round_it() -> None:
    assert held_gradients(1, 1, 0).kept == 0
    assert held_gradients(1, 1, 0, is_rounded=True).kept == 1


@given(st.integers(1, 32), st.integers(1, 32), st.data())
def test_more_ranks_never_wait_with_more_sums(virtual_workers: int, ranks: int, data: st.DataObject) -> None:
    ranks = min(ranks, virtual_workers)
    rank = data.draw(st.integers(0, ranks - 1))
    alone, held = held_gradients(virtual_workers, 1, 0), held_gradients(virtual_workers, ranks, rank)
    assert max(held.open) <= max(alone.open)
    assert len(held.open) <= -(-virtual_workers // ranks)


def test_the_largest_moment_decides() -> None:
    found = moments(STATE, PASSES, Division(1, 1, 1), on_gpu=False)
    assert peak(found) == found["backward pass"]
    assert found["backward pass"].total == 4000 + 10 + 20 + 8000 + 100 + 12_000
    assert found["update"].total == 4000 + 10 + 20 + 8000 + 100 + 4000 + 500
    large = replace(STATE, update_bytes=50_000)
    assert peak(moments(large, PASSES, Division(1, 1, 1))) == moments(large, PASSES, Division(1, 1, 1))["update"]


def test_later_micro_batches_have_a_gradient_beside_them() -> None:
    one, two = (moments(STATE, PASSES, Division(1, count, 1), on_gpu=False) for count in (1, 2))
    assert two["backward pass"].total == one["backward pass"].total - 12_000 + 11_500 + 4000


def test_a_gpu_has_the_next_batch_as_well_and_sums_in_16_bits_take_half() -> None:
    gpu, cpu = (peak(moments(STATE, PASSES, Division(4, 1, 2), on_gpu=on_gpu)) for on_gpu in (True, False))
    assert gpu.total - cpu.total == PASSES.batch_bytes
    half = moments(STATE, PASSES, Division(4, 1, 2, wire=0.5))["update"]
    whole = moments(STATE, PASSES, Division(4, 1, 2))["update"]
    assert whole.gradients - half.gradients == held_gradients(4, 2, 0).kept * 2000


def test_counts_of_two_sizes_give_those_of_others() -> None:
    larger = replace(PASSES, samples=8, saved_bytes=18_000, work=PASSES.work * 2)
    assert extrapolated(PASSES, larger, 16).saved_bytes == 34_000
    assert extrapolated(PASSES, larger, 16).work == PASSES.work * 4
    assert extrapolated(PASSES, larger, 4) == PASSES
