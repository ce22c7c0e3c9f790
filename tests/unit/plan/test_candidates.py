"""Tests of step times and of the choice among configurations."""

from dataclasses import replace

import pytest
from test_memory import PASSES, STATE

from undula.plan.candidates import Candidate, Kind, Offer, Target, Workload, candidates, cheapest, chosen, fastest
from undula.plan.gpus import GPUS
from undula.plan.memory import Division
from undula.plan.plan import PlanSpec
from undula.plan.scaling import Link
from undula.plan.step_time import step_seconds, summed_bytes
from undula.plan.work import DeviceRates

LINK = Link(1e-4, 1e9)
RATES = DeviceRates(flops_per_s=100.0, bytes_per_s=1e6)
GIB = 2**30
LARGE = replace(
    PASSES,
    saved_bytes=20 * GIB,
    forward_bytes=20 * GIB,
    first_bytes=21 * GIB,
    later_bytes=21 * GIB,
    work=replace(PASSES.work, flops=10**13),
)
SMALL = replace(
    LARGE,
    saved_bytes=2 * GIB,
    forward_bytes=3 * GIB,
    first_bytes=3 * GIB,
    later_bytes=3 * GIB,
    work=replace(PASSES.work, flops=13 * 10**12),
)
WORKLOAD = Workload(
    STATE,
    [Kind("all", "bf16", LARGE), Kind("none", "bf16", SMALL)],
    PlanSpec(global_batch=16, virtual_workers=4),
    steps=100,
)


def found(*workers: int, gpu: str = "L4", changes: float = 0.0) -> list[Candidate[str]]:
    offer = Offer(GPUS[gpu], "g6.xlarge", 1.0, 0.5)
    return list(candidates(WORKLOAD, [offer], workers or (1, 2, 4), LINK, changes))


def test_passes_take_what_operations_and_memory_take_but_no_less_than_the_host() -> None:
    assert RATES.seconds(PASSES.work) == pytest.approx(10 / 100 + 10 / 1e6)
    assert replace(RATES, operation_s=1.0).seconds(PASSES.work) == PASSES.work.operations


@pytest.mark.parametrize(("workers", "passes"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_the_worker_with_most_virtual_workers_decides(workers: int, passes: int) -> None:
    step = step_seconds(STATE, PASSES, Division(4, 1, workers), RATES, LINK)
    assert step.compute == pytest.approx(passes * RATES.seconds(PASSES.work))


def test_an_update_adds_up_the_gradients_of_the_workers_own_virtual_workers() -> None:
    alone, shared = (step_seconds(STATE, PASSES, Division(4, 1, workers), RATES, LINK).update for workers in (1, 4))
    added = 3 * 3 + 2 * 2  # three sums, each of two gradients, and two copies
    assert alone - shared == pytest.approx(added * STATE.gradient_bytes / RATES.bytes_per_s)
    alone_bytes = summed_bytes(STATE.gradient_bytes, 1) + STATE.update_moved_bytes
    assert shared == pytest.approx(alone_bytes / RATES.bytes_per_s)


def test_one_worker_exchanges_nothing_and_several_do_behind_the_backward_pass() -> None:
    slow = Link(0.0, 1000.0)
    assert step_seconds(STATE, PASSES, Division(4, 1, 1), RATES, slow).communication == 0
    exposed = step_seconds(STATE, PASSES, Division(4, 1, 2), RATES, slow).communication
    assert exposed == pytest.approx(STATE.gradient_bytes / 1000.0)  # a single bucket, which is sent at the end
    buckets = replace(STATE, gradient_bytes=100 * 2**20)
    quick = DeviceRates(1e30, 1e30, 0.5)
    hidden = step_seconds(buckets, PASSES, Division(4, 1, 2), quick, Link(0.0, 100 * 2**20)).communication
    assert 0 <= hidden < 1.0


def test_a_stream_that_is_slower_than_the_worker_is_waited_for() -> None:
    step = step_seconds(STATE, PASSES, Division(4, 1, 1), RATES, LINK, samples_per_s=10.0)
    assert step.total - step.communication - step.update == pytest.approx(16 / 10.0)


def test_what_does_not_fit_is_neither_cheapest_nor_fastest() -> None:
    every = found()
    assert {each.setting: each.fits for each in every} == {"all": False, "none": True}
    for best in (cheapest(every), fastest(every)):
        assert best is not None
        assert best.setting == "none"
    assert cheapest([each for each in every if not each.fits]) is None


def test_more_workers_are_faster_but_never_more_than_their_number() -> None:
    one, two, four = (each for each in found() if each.setting == "none")
    assert one.hours > two.hours > four.hours
    for each in (two, four):
        assert one.hours / each.hours <= each.workers
        assert each.efficiency == pytest.approx(one.hours / each.hours / each.workers)


def test_spot_workers_cost_less_and_take_longer() -> None:
    alone, interrupted = (found(4, changes=changes)[1] for changes in (0.0, 2.0))
    assert alone.spot_hours == alone.hours
    assert interrupted.spot_hours > interrupted.hours
    assert interrupted.dollars == pytest.approx(4 * interrupted.hours)
    assert interrupted.spot_dollars == pytest.approx(0.5 * 4 * interrupted.spot_hours)


def test_a_target_chooses_the_cheapest_that_is_fast_enough_or_the_fastest_within_a_price() -> None:
    every = found()
    one, two, four = (each for each in every if each.setting == "none")
    assert chosen(every, None) is cheapest(every)
    assert chosen(every, Target("hours", two.hours)) in (two, four)
    assert chosen(every, Target("samples/s", four.samples_per_s)) is four
    assert chosen(every, Target("dollars", 1e9)) is fastest(every)
    assert chosen(every, Target("dollars", 1e-9)) is None
    assert one.spot_dollars is not None
    within = chosen(every, Target("dollars", one.spot_dollars))
    assert within is not None
    assert within.spot_dollars is not None
    assert within.spot_dollars <= one.spot_dollars


def test_tokens_per_second_are_those_of_the_samples_and_can_be_a_target() -> None:
    offer = Offer(GPUS["L4"], "g6.xlarge", 1.0, 0.5)
    every = list(candidates(replace(WORKLOAD, tokens=257), [offer], (1, 2, 4), LINK, 0.0))
    assert [each.tokens_per_s for each in every] == [257 * each.samples_per_s for each in every]
    four = next(each for each in every if each.setting == "none" and each.workers == 4)
    assert four.tokens_per_s is not None
    assert chosen(every, Target("tokens/s", four.tokens_per_s)) is four
    assert chosen(every, Target("tokens/s", four.tokens_per_s * 1.01)) is None
    assert {each.tokens_per_s for each in found()} == {None}


def test_recomputed_operations_do_not_count_as_use_of_the_gpu() -> None:
    plain, recomputed = found(1)
    assert plain.mfu > recomputed.mfu
    assert plain.mfu < 1


@pytest.mark.parametrize("name", GPUS)
def test_tables_of_gpus_are_plausible(name: str) -> None:
    gpu = GPUS[name]
    assert 0 < gpu.tflops["fp32"] <= gpu.tflops["bf16"] <= gpu.tflops["fp16"]
    assert gpu.machines
    assert gpu.memory_bytes > 10 * GIB
