"""Tests of the arithmetic of sharded models: what a rank holds and sends, and how long it waits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_memory import PASSES, STATE

from undula.plan.memory import Division, SplitTensor, UnitCount
from undula.plan.scaling import Link
from undula.plan.sharded_sums import gradient_messages, own_virtual_workers, passes_of_step, reduction
from undula.plan.step_memory import moments, sent_bytes
from undula.plan.step_time import step_seconds
from undula.plan.work import DeviceRates

UNITS = tuple(UnitCount((SplitTensor(rows, 10, trains=True, state_row_bytes=20),)) for rows in (4, 10, 10))
"""Rest of the model with 40 bytes, and two units with 100 bytes each."""
LINK = Link(0.0, 1000.0)


SHARDED = replace(STATE, parameter_bytes=240, optimizer_bytes=481, gradient_bytes=240, units=UNITS)
PASSED = replace(PASSES, saved_bytes=0, forward_bytes=0, first_bytes=240, later_bytes=0)
"""Passes of a model without activations."""


def test_a_unit_is_gathered_for_each_pass_in_stage_3_and_once_a_step_otherwise() -> None:
    sent = {stage: sent_bytes(SHARDED, PASSED, Division(4, 1, 2, stage=stage)) for stage in (1, 2, 3)}
    assert sent[3].parameters == 2 * (40 + 2 * (100 + 100)) / 2
    assert sent[3].gathers == 2 * 5
    assert [sent[stage].parameters for stage in (1, 2)] == [(40 + 100 + 100) / 2] * 2


def test_a_unit_in_16_bits_is_half_as_large() -> None:
    half, division = replace(PASSED, gathered_share=0.5), Division(4, 1, 2, stage=3)
    assert sent_bytes(SHARDED, half, division).parameters == sent_bytes(SHARDED, PASSED, division).parameters / 2
    found = [moments(SHARDED, each, division, on_gpu=False)["forward pass"].gathered for each in (PASSED, half)]
    assert found == [40 + 100 + 100, (40 + 100 + 100) / 2]


def test_stage_3_gathers_the_unit_that_computes_and_the_next_one_and_stage_1_all_of_them() -> None:
    many = replace(SHARDED, units=(UNITS[0], *[UNITS[1]] * 7))
    gathered = {
        stage: moments(many, PASSED, Division(2, 1, 2, stage=stage), on_gpu=False)["forward pass"].gathered
        for stage in (1, 3)
    }
    assert gathered == {1: 40 + 7 * 100 + 100, 3: 40 + 100 + 100}


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
    sent = sent_bytes(SHARDED, PASSED, Division(4, 1, 2, stage=3))
    assert sent.gradients == 2 * 240 / 2


def test_sums_are_finished_one_unit_after_another() -> None:
    assert reduction((40, 100, 100), 4, 2, 0, 3) == (240 + 100) / 2
    # One root of each rank: beside the whole gradient, the slices of two roots, and their sum.
    assert reduction((40, 100), 4, 2, 0, 1) == max(140 + 2 * 20 + 40, 100 + 20 + 2 * 50 + 100)


def test_a_rank_holds_its_part_of_the_states() -> None:
    own = SHARDED.of_rank(3)
    assert own.parameter_bytes == (2 + 4 + 4) * 10
    assert own.optimizer_bytes == 1 + 2 * own.parameter_bytes
    assert own.buffer_bytes == SHARDED.buffer_bytes
    found = moments(SHARDED, PASSED, Division(4, 1, 3, stage=3), on_gpu=False)
    assert {each.parameters for each in found.values()} == {own.parameter_bytes}


def test_a_gpu_gathers_behind_its_passes_and_a_cpu_does_not() -> None:
    quick = DeviceRates(1e30, 1e30, operation_s=1e-9)
    busy = DeviceRates(1e30, 1e30, operation_s=1.0)
    for stage in (1, 2, 3):
        division = Division(4, 1, 2, stage=stage)
        sent = sent_bytes(SHARDED, PASSED, division)
        waits = [step_seconds(SHARDED, PASSED, division, each, LINK).communication for each in (quick, busy)]
        assert waits[0] == pytest.approx(sent.total / 1000, rel=1e-3)
        assert waits[1] == pytest.approx(sent.gradients / 1000 if stage == 1 else 0.0)
        cpu = step_seconds(SHARDED, PASSED, division, replace(busy, is_async=False), LINK).communication
        assert cpu == pytest.approx(sent.total / 1000)
        assert step_seconds(SHARDED, PASSED, Division(4, 1, 1, stage=stage), quick, LINK).communication == 0
