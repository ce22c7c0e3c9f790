"""An elastic batch: how much a step takes, and the learning rate's way from one batch to the next."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from undula.plan.plan import Plan, PlanSpec
from undula.plan.rules import RULES, LrFactor
from undula.plan.schedule import ScheduleSpec
from undula.run.rate import rate_for

ELASTIC = PlanSpec(global_batch=8, virtual_workers=8, epochs=3, batch="elastic", batch_workers=2)


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=40),
    st.integers(8, 100),
    st.sampled_from(["short", "drop", "wrap"]),
)
def test_whatever_workers_come_and_go_the_steps_of_the_plan_are_taken_in_order_once(
    world_sizes: list[int], num_rows: int, last_step: str
) -> None:
    spec = PlanSpec(global_batch=8, virtual_workers=8, epochs=3, batch="elastic", batch_workers=2, last_step=last_step)  # type: ignore[arg-type]
    plan = Plan(spec, num_rows)
    index = 0
    for number in range(10_000):
        if index == plan.total_steps:
            break
        span = plan.span(index, world_sizes[number % len(world_sizes)])
        assert span >= 1
        assert plan.step(index).epoch == plan.step(index + span - 1).epoch
        index += span
    assert index == plan.total_steps


def test_a_fixed_batch_does_not_see_the_workers() -> None:
    plan = Plan(PlanSpec(global_batch=8, virtual_workers=8), 80)
    assert [plan.span(0, world_size) for world_size in (1, 2, 4, 8)] == [1, 1, 1, 1]


def test_an_elastic_batch_follows_the_workers_by_whole_global_batches() -> None:
    plan = Plan(ELASTIC, 800)
    assert [plan.span(0, world_size) for world_size in (1, 2, 3, 4, 7, 8)] == [1, 1, 1, 2, 3, 4]


def test_the_rules() -> None:
    assert [RULES[name](4.0) for name in ("none", "linear", "sqrt")] == [1.0, 4.0, 2.0]


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 500)), min_size=1, max_size=8),
    st.integers(0, 300),
)
def test_the_factor_climbs_without_a_jump_and_falls_at_once(changes: list[tuple[float, int]], rewarm: int) -> None:
    factor, samples = LrFactor(1.0, 1.0), 0
    for end, after in changes:
        samples += after
        before = factor.at(samples, rewarm)
        factor = factor.towards(end, samples, rewarm)
        at_change = factor.at(samples, rewarm)
        assert at_change == pytest.approx(before if factor.end > before and rewarm else factor.end)
        assert factor.at(samples + rewarm, rewarm) == factor.end
        way = [factor.at(samples + step * rewarm // 4, rewarm) for step in range(5)]
        assert way == sorted(way)
        assert factor.towards(end, samples + 1, rewarm) is factor


def test_a_group_goes_on_from_where_the_rate_of_the_one_before_was() -> None:
    schedule = ScheduleSpec(base_lr=1.0, decay="constant", batch_rule="linear", rewarm_samples=32)
    plan = Plan(ELASTIC, 800)
    first, told = rate_for(schedule, plan, 2, 0, {})
    assert told is not None
    assert first.multiplier(8, 1) == 1.0
    grown, told = rate_for(schedule, plan, 4, 10, first.values())
    assert told is not None
    assert told.message == "steps of 16 samples, learning rate times 2 after 32 samples"
    assert [grown.multiplier(80 + samples, 2) for samples in (0, 16, 32, 48)] == [1.0, 1.5, 2.0, 2.0]
    assert grown.multiplier(128, 1) == 1.0  # the last step of an epoch, with one global batch left
    # A crash on the way up: the same workers come back, and the way goes on.
    again, told = rate_for(schedule, plan, 4, 12, grown.values())
    assert told is None
    assert again.multiplier(96, 2) == 1.5
    shrunk, _ = rate_for(schedule, plan, 2, 12, again.values())
    assert shrunk.multiplier(104, 1) == 1.0


def test_torchs_sgd_needs_no_momentum_correction() -> None:
    """Equation 10 of Goyal et al. 2017 with its correction of the buffer by lr / former lr, step for step."""
    torch.manual_seed(0)
    gradients = torch.randn(12, 3, dtype=torch.float64)
    weights = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    expected, buffer, former = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0.1
    for number, gradient in enumerate(gradients):
        lr = 0.1 * LrFactor(1.0, 4.0, 3).at(number, 5)
        optimizer.param_groups[0]["lr"] = lr
        weights.grad = gradient.clone()
        optimizer.step()
        buffer = 0.9 * (lr / former) * buffer + lr * gradient
        expected, former = expected - buffer, lr
        torch.testing.assert_close(weights.detach(), expected)
