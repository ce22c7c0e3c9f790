"""Tests of the plan: its steps, the virtual workers' shares and their assignment to ranks, for any numbers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from undula.errors import SpecError
from undula.plan.plan import Plan, PlanSpec
from undula.plan.precision import PrecisionSpec


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    virtual_workers = draw(st.integers(1, 9))
    spec = PlanSpec(
        global_batch=virtual_workers * draw(st.integers(1, 6)),
        virtual_workers=virtual_workers,
        micro_batch=draw(st.none() | st.integers(1, 8)),
        epochs=draw(st.integers(1, 3)),
        max_steps=draw(st.none() | st.integers(1, 40)),
        last_step=draw(st.sampled_from(["short", "drop", "wrap"])),
    )
    fewest = spec.global_batch if spec.last_step == "drop" else virtual_workers
    return Plan(spec, num_rows=draw(st.integers(fewest, 200)))


@given(plans())
def test_shares_sum_to_the_samples_of_the_step(plan: Plan) -> None:
    for index in range(plan.steps_per_epoch):
        shape = plan.step(index)
        shares = [plan.share(shape.step_in_epoch, v) for v in range(plan.spec.virtual_workers)]
        assert sum(shares) == shape.samples
        assert max(shares) - min(shares) <= 1


@given(plans())
def test_every_epoch_consumes_the_samples_that_last_step_specifies(plan: Plan) -> None:
    shapes = [plan.step(index) for index in range(plan.spec.epochs * plan.steps_per_epoch)]
    batch, rows = plan.spec.global_batch, plan.num_rows
    expected = {"short": rows, "drop": rows - rows % batch, "wrap": rows + -rows % batch}[plan.spec.last_step]
    for epoch, steps in itertools.groupby(shapes, key=lambda shape: shape.epoch):
        of_epoch = list(steps)
        assert sum(shape.samples for shape in of_epoch) == expected
        assert [shape.step_in_epoch for shape in of_epoch] == list(range(plan.steps_per_epoch))
        assert all(shape.samples == batch for shape in of_epoch[:-1])
        assert of_epoch[-1].samples == (batch if plan.spec.last_step != "short" else (rows - 1) % batch + 1)
        assert of_epoch[0].samples_before == epoch * expected
    before = list(itertools.accumulate((shape.samples for shape in shapes), initial=0))
    assert [shape.samples_before for shape in shapes] == before[:-1]


@given(plans())
def test_total_samples_are_the_sum_over_all_steps(plan: Plan) -> None:
    assert plan.total_samples == sum(plan.step(index).samples for index in range(plan.total_steps))
    assert plan.total_steps <= (plan.spec.max_steps or plan.total_steps)


@given(plans())
def test_micro_batches_make_up_the_share(plan: Plan) -> None:
    for step in {0, plan.steps_per_epoch - 1}:
        for v in range(plan.spec.virtual_workers):
            sizes = plan.micro_batches(step, v)
            assert sum(sizes) == plan.share(step, v)
            assert all(0 < size <= (plan.spec.micro_batch or size) for size in sizes)
            assert all(size == plan.spec.micro_batch for size in sizes[:-1])


def test_digest_depends_on_the_plan_and_the_data() -> None:
    specs = [PlanSpec(), PlanSpec(seed=1), PlanSpec(global_batch=128), PlanSpec(shuffle="none"), PlanSpec(window=5)]
    digests = [Plan(spec, 1000).digest("data") for spec in specs] + [Plan(PlanSpec(), 1000).digest("other data")]
    assert len(set(digests)) == 6
    assert Plan(PlanSpec(), 1000).digest("data") == digests[0]


def test_digest_depends_on_the_precision_but_that_of_fp32_is_the_one_of_older_versions() -> None:
    plan = Plan(PlanSpec(), 1000)
    formats = [
        PrecisionSpec(),
        PrecisionSpec(compute="bf16"),
        PrecisionSpec(compute="fp16"),
        PrecisionSpec(compute="fp16", loss_scale=1024),
    ]
    digests = [plan.digest("data", precision) for precision in formats]
    assert len(set(digests)) == 4
    assert digests[0] == plan.digest("data")
    assert digests[0].startswith("0449fdd25cb456e2")


def test_sizes_are_those_of_all_micro_batches_of_the_run() -> None:
    spec = PlanSpec(global_batch=20, virtual_workers=4, micro_batch=3)
    assert Plan(spec, 48).sizes() == {3, 2}  # 5 = 3 + 2 in full steps, and 2 in the last step of 8 samples
    assert Plan(spec, 42).sizes() == {3, 2, 1, 0}  # two virtual workers have no share of the last step of 2 samples
    short = PlanSpec(global_batch=20, virtual_workers=4, micro_batch=3, max_steps=2)
    assert Plan(short, 42).sizes() == {3, 2}


def test_a_global_batch_that_is_no_multiple_is_refused_with_the_nearest_multiples() -> None:
    with pytest.raises(ValidationError, match=r"global_batch is 10, .* virtual_workers \(4\); set it to 8 or 12"):
        PlanSpec(global_batch=10, virtual_workers=4)


def test_more_virtual_workers_than_samples_are_refused() -> None:
    with pytest.raises(SpecError, match=r"plan.virtual_workers is 4, more than the 3 samples"):
        Plan(PlanSpec(), num_rows=3)
    assert Plan(PlanSpec(), num_rows=4).total_steps == 1


def test_dropping_the_only_step_is_refused() -> None:
    with pytest.raises(SpecError, match=r"plan\.global_batch is 64, more than the 10 samples"):
        Plan(PlanSpec(last_step="drop"), num_rows=10)
