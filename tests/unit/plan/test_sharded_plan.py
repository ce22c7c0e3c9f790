"""Tests of the arithmetic of sharded models: what a rank holds and sends, and how long it waits."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_memory import PASSES, STATE

from undula.errors import UsageError
from undula.plan.memory import Division, extrapolated
from undula.plan.scaling import Link
from undula.plan.sharded_sums import gradient_messages, own_virtual_workers, passes_of_step, reduction
from undula.plan.step_memory import moments, sent_bytes
from undula.plan.step_time import step_seconds
from undula.plan.unit_pass import Mark, MarkKind, PassSums, Replay, ReplayedPass, SplitTensor, UnitCount
from undula.plan.work import DeviceRates

UNITS = tuple(UnitCount((SplitTensor(rows, 10, trains=True, state_row_bytes=20),)) for rows in (4, 10, 10))
"""Rest of the model with 40 bytes, and two units with 100 bytes each."""
LINK = Link(0.0, 1000.0)


def marks(*each: tuple[int, MarkKind], is_backward: bool) -> list[Mark]:
    """Return marks of a model without activations, whose gradients are as large as its parameters."""
    sizes = [40, 100, 100]
    return [
        Mark(unit, kind, is_backward, 0, 0, 0) if kind != "backward end" else Mark(unit, kind, True, size, 0, size)
        for unit, kind in each
        for size in [sizes[unit]]
    ]


FORWARD = marks(
    (0, "forward"),
    *((unit, kind) for unit in (1, 2) for kind in ("forward", "forward end")),  # type: ignore[misc]
    (0, "forward end"),
    is_backward=False,
)
BACKWARD = marks(
    (0, "backward"),
    *((unit, kind) for unit in (2, 1) for kind in ("backward", "backward end")),  # type: ignore[misc]
    (0, "backward end"),
    is_backward=True,
)
SHARDED = replace(STATE, parameter_bytes=240, optimizer_bytes=481, gradient_bytes=240, units=UNITS)
MARKED = replace(PASSES, marks=(*FORWARD, *BACKWARD))


def replayed(
    stage: int, is_first: bool = True, is_last: bool = True, each: Sequence[Mark] = MARKED.marks
) -> ReplayedPass:
    return Replay(UNITS, 2, stage, PassSums(0.0, 0.0), is_first, is_last).run(each)


def test_a_unit_is_received_beside_the_one_before_and_copied_when_that_one_is_freed() -> None:
    # The rest of the model, what was received of the first unit, and what is received of the second one, or its parameters.
    assert replayed(3).forward.gathered == 40 + 100 + 100
    assert replayed(1).forward.gathered == 40 + 100 + 100 + 100, "stage 1 keeps the first unit"


def test_a_unit_is_gathered_for_each_pass_in_stage_3_and_once_a_step_otherwise() -> None:
    assert replayed(3).sent_bytes == (40 + 2 * (100 + 100)) / 2
    assert replayed(3).gathers == 5
    assert replayed(2).sent_bytes == (40 + 100 + 100) / 2
    assert replayed(2, is_first=False).sent_bytes == 0


def test_a_unit_in_16_bits_is_half_as_large_and_converted_before_it_is_sent() -> None:
    half = Replay(UNITS, 2, 3, PassSums(0.0, 0.0), True, True, gathered_share=0.5).run(MARKED.marks)
    assert half.sent_bytes == replayed(3).sent_bytes / 2
    assert half.forward.gathered == (40 + 100 + 100) / 2 + 100 / 4, "the shard of the second unit"


def test_the_next_unit_is_received_while_one_computes_its_gradient() -> None:
    begun = replayed(3, each=[*FORWARD, *BACKWARD[:2]]).backward
    assert begun.gathered == 40 + 100 + 100, "the rest, and the unit before and after it is copied"
    assert begun.gradients == 0
    most = replayed(3).backward
    assert most.gathered == 40 + 100 + 100, "the next unit is copied"
    assert most.gradients == 100 + 50, (
        "the concatenated gradient of the last one, and the slice that torch takes for its sum"
    )


def test_a_recomputed_unit_is_gathered_until_its_backward_pass_has_ended() -> None:
    again = marks((1, "forward"), (1, "forward end"), is_backward=True)
    plain, repeated = (replayed(3, each=[*FORWARD, *BACKWARD[:2], *more]) for more in ([], again))
    assert repeated.backward.gathered >= plain.backward.gathered + 100
    assert repeated.gathers == plain.gathers, "the unit had been gathered in advance"


def test_stages_2_and_3_hold_slices_of_the_sums_and_stage_1_whole_ones() -> None:
    (one, _), _ = ([each.sums for each in passes_of_step(4, 2, 0, stage, 1)][:2] for stage in (1, 2))
    assert (one.before, one.after, one.keeps_flat) == (0, 1, True)
    slices = [each.sums for each in passes_of_step(4, 2, 0, 2, 1)]
    assert [(each.before, each.after) for each in slices] == [(0, 0.5), (0.5, 0.5)]


@given(st.integers(1, 32), st.integers(2, 8), st.integers(1, 3), st.integers(1, 3))
def test_a_rank_holds_one_slice_for_each_level_of_the_tree(
    virtual_workers: int, ranks: int, stage: int, micro_batches: int
) -> None:
    ranks = min(ranks, virtual_workers)
    depth = (virtual_workers - 1).bit_length()
    for each in passes_of_step(virtual_workers, ranks, 0, stage, micro_batches):
        if stage >= 2 and ranks > 1:
            assert each.sums.before <= (1 + depth) / ranks + (micro_batches > 1)
        assert 0 <= each.sums.before <= 2 + depth


@given(st.integers(1, 32), st.integers(1, 8))
def test_each_virtual_worker_belongs_to_one_rank(virtual_workers: int, ranks: int) -> None:
    ranks = min(ranks, virtual_workers)
    for stage in (1, 2, 3):
        shares = [own_virtual_workers(virtual_workers, ranks, rank, stage) for rank in range(ranks)]
        assert sorted(each for share in shares for each in share) == list(range(virtual_workers))


def test_gradients_that_are_sent_are_those_of_the_docs() -> None:
    assert [gradient_messages(4, 2, 0, stage) for stage in (1, 2, 3)] == [1, 2, 2]
    assert [gradient_messages(6, 4, rank, 2) for rank in range(4)] == [2, 2, 1, 1]
    assert gradient_messages(4, 1, 0, 3) == 0
    sent = sent_bytes(SHARDED, MARKED, Division(4, 1, 2, stage=3))
    assert sent.gradients == 2 * 240 / 2
    assert sent.parameters == 2 * replayed(3).sent_bytes
    assert sent_bytes(SHARDED, MARKED, Division(4, 1, 2, stage=2)).parameters == replayed(2).sent_bytes


def test_sums_are_finished_one_unit_after_another() -> None:
    assert reduction((40, 100, 100), 4, 2, 0, 3) == (240 + 100) / 2
    # One root of each rank: beside the whole gradient, the slices of two roots, and their sum.
    assert reduction((40, 100), 4, 2, 0, 1) == max(140 + 2 * 20 + 40, 100 + 20 + 2 * 50 + 100)


def test_a_rank_holds_its_part_of_the_states() -> None:
    own = SHARDED.of_rank(3)
    assert own.parameter_bytes == (2 + 4 + 4) * 10
    assert own.optimizer_bytes == 1 + 2 * own.parameter_bytes
    assert own.buffer_bytes == SHARDED.buffer_bytes
    found = moments(SHARDED, MARKED, Division(4, 1, 3, stage=3), on_gpu=False)
    assert {each.parameters for each in found.values()} == {own.parameter_bytes}


def test_marks_of_two_sizes_give_those_of_others() -> None:
    larger = replace(MARKED, samples=8, marks=tuple(replace(each, peak=7, bytes=9) for each in MARKED.marks))
    assert {(each.peak, each.bytes) for each in extrapolated(MARKED, larger, 12).marks[:3]} == {(14, 18)}
    with pytest.raises(UsageError, match="run in an order that depends on the number of samples"):
        extrapolated(MARKED, replace(larger, marks=larger.marks[1:]), 16)


def test_a_gpu_gathers_behind_its_passes_and_a_cpu_does_not() -> None:
    quick = DeviceRates(1e30, 1e30, operation_s=1e-9)
    busy = DeviceRates(1e30, 1e30, operation_s=1.0)
    for stage in (1, 2, 3):
        division = Division(4, 1, 2, stage=stage)
        sent = sent_bytes(SHARDED, MARKED, division)
        waits = [step_seconds(SHARDED, MARKED, division, each, LINK).communication for each in (quick, busy)]
        assert waits[0] == pytest.approx(sent.total / 1000, rel=1e-3)
        assert waits[1] == pytest.approx(sent.gradients / 1000 if stage == 1 else 0.0)
        cpu = step_seconds(SHARDED, MARKED, division, replace(busy, is_async=False), LINK).communication
        assert cpu == pytest.approx(sent.total / 1000)
        assert step_seconds(SHARDED, MARKED, Division(4, 1, 1, stage=stage), quick, LINK).communication == 0
