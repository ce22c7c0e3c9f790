"""Tests of the elastic batch: how many samples a step takes, and how the learning rate follows the batch size."""

from math import inf, sqrt
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from undula.errors import SpecError
from undula.plan.noise import Measured, NoiseScale
from undula.plan.plan import Plan, PlanSpec
from undula.plan.rules import RULES, Ramp, RuleName, scaled_beta, warning
from undula.plan.schedule import ScheduleSpec
from undula.train.learning_rate import GroupRates, Rate, rate_for

ELASTIC = PlanSpec(global_batch=8, virtual_workers=8, epochs=3, batch="elastic", batch_workers=2)


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=40),
    st.integers(8, 100),
    st.sampled_from(["short", "drop", "wrap"]),
)
def test_every_step_of_the_plan_is_taken_once_and_in_order_at_any_sequence_of_world_sizes(
    world_sizes: list[int], num_rows: int, last_step: str
) -> None:
    spec = PlanSpec(global_batch=8, virtual_workers=8, epochs=3, batch="elastic", batch_workers=2, last_step=last_step)  # type: ignore[arg-type]
    plan = Plan(spec, num_rows)
    index = 0
    for number in range(10_000):
        if index == plan.total_steps:
            break
        merged = plan.merged_steps(index, world_sizes[number % len(world_sizes)])
        assert merged >= 1
        assert plan.step(index).epoch == plan.step(index + merged - 1).epoch
        index += merged
    assert index == plan.total_steps


def test_a_fixed_batch_does_not_depend_on_the_world_size() -> None:
    plan = Plan(PlanSpec(global_batch=8, virtual_workers=8), 80)
    assert [plan.merged_steps(0, world_size) for world_size in (1, 2, 4, 8)] == [1, 1, 1, 1]


def test_an_elastic_batch_grows_with_the_world_size_by_whole_global_batches() -> None:
    plan = Plan(ELASTIC, 800)
    assert [plan.merged_steps(0, world_size) for world_size in (1, 2, 3, 4, 7, 8)] == [1, 1, 1, 2, 3, 4]


MEASURING: list[RuleName] = [name for name, rule in RULES.items() if rule.is_measured]
NOISE = st.just(None) | st.just(inf) | st.floats(0, 1e6)


def test_each_rule_applies_its_formula() -> None:
    for rule in RULES.values():
        assert rule.scaled(4.0, 2.0) == rule.known


@given(st.sampled_from(list(RULES)), NOISE)
def test_no_rule_changes_anything_at_the_base_batch(name: RuleName, noise: float | None) -> None:
    scaled = RULES[name].scaled(1.0, noise)
    assert (scaled.lr, scaled.eps, scaled.warmup) == (pytest.approx(1.0), 1.0, 1.0)
    assert scaled.one_minus_beta in (None, 1.0)
    assert scaled.gain in (None, pytest.approx(1.0))


@given(st.sampled_from(MEASURING), st.floats(1, 1000), NOISE)
def test_measured_factors_lie_between_those_without_noise_and_with_pure_noise(
    name: RuleName, kappa: float, noise: float | None
) -> None:
    factor = RULES[name].scaled(kappa, noise).lr
    low, high = (1 / sqrt(kappa), sqrt(kappa)) if name == "surge" else (1.0, kappa)
    assert low - 1e-9 <= factor <= high + 1e-9
    assert RULES[name].scaled(kappa, None).lr == 1.0
    assert RULES[name].scaled(kappa, inf).lr == pytest.approx(high)
    assert RULES[name].scaled(kappa, 0.0).lr == pytest.approx(low)


@given(st.floats(1, 100), st.floats(0.01, 1e4))
def test_adascales_gain_is_the_factor_of_the_noise_scale(kappa: float, noise: float) -> None:
    """(v + m) / (v / S + m) = (1 + B_noise / B0) / (1 + B_noise / B), with v / m = B_noise / B0 and B = S B0."""
    assert RULES["adascale"].scaled(kappa, noise).lr == RULES["noise_scale"].scaled(kappa, noise).lr
    assert RULES["adascale"].scaled(kappa, noise).lr == pytest.approx((noise + 1) / (noise / kappa + 1))


@given(st.floats(2, 1000), st.floats(1.01, 5))
def test_surge_peaks_where_the_batch_is_the_noise_scale(noise: float, apart: float) -> None:
    peak = RULES["surge"].scaled(noise, noise).lr
    assert RULES["surge"].scaled(noise * apart, noise).lr < peak
    assert RULES["surge"].scaled(noise * apart, noise).lr == pytest.approx(
        RULES["surge"].scaled(noise / apart, noise).lr
    )


def test_betas_average_over_the_same_number_of_samples_and_at_least_one_step() -> None:
    assert scaled_beta(0.999, 8.0) == pytest.approx(0.992)
    assert scaled_beta(0.9, 8.0) == pytest.approx(0.2)
    with pytest.raises(
        SpecError, match=r"adam_sde with a beta of 0.9 .* below 10 times schedule.base_batch, .* reach 16 times"
    ):
        scaled_beta(0.9, 16.0)


@pytest.mark.parametrize(
    ("rule", "optimizer", "message"),
    [
        ("linear", torch.optim.SGD, None),
        ("none", torch.optim.Rprop, None),
        ("adam_sde", torch.optim.AdamW, None),
        ("surge", torch.optim.Adagrad, None),
        ("linear", torch.optim.AdamW, "LARS, SGD, but the optimizer is AdamW; for AdamW, use one of sqrt, adam_sde, surge"),
        ("adam_sde", torch.optim.SGD,
         "Adam, AdamW, RMSprop, but the optimizer is SGD; for SGD, use one of linear, sqrt, legw, adascale, noise_scale"),
        ("linear", torch.optim.Rprop, "LARS, SGD, but the optimizer is Rprop; compare the run with one at the base batch"),
    ],
)  # fmt: skip
def test_a_rule_warns_about_optimizers_that_it_is_not_known_for(
    rule: RuleName, optimizer: Any, message: str | None
) -> None:
    made = optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    plan = Plan(PlanSpec(global_batch=8), 80)
    warning = GroupRates(made, ScheduleSpec(batch_rule=rule, base_batch=4), plan).warning
    assert warning == (message and f"schedule.batch_rule={rule} is only known to hold for {message}")
    assert GroupRates(made, ScheduleSpec(batch_rule=rule), plan).warning is None  # the batch is the base batch


def test_an_optimizer_without_the_base_rate_is_described() -> None:
    def others(*rates: float) -> str | None:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
        return GroupRates(
            torch.optim.SGD(groups), ScheduleSpec(base_lr=0.001), Plan(PlanSpec(global_batch=8), 80)
        ).others

    assert others(0.3) == "they have [0.3], and schedule.base_lr is 0.001"
    assert others(0.01, 0.001) is None


def test_rules_for_layerwise_optimizers() -> None:
    for rule, optimizer in (("linear", "LARS"), ("sqrt", "LARS"), ("legw", "LARS"), ("sqrt", "Lamb"), ("legw", "Lamb")):
        assert warning(rule, (optimizer, "BaseOptimizer", "Optimizer")) is None  # type: ignore[arg-type]
    message = warning("linear", ("Lamb", "BaseOptimizer", "Optimizer"))
    assert message is not None
    assert message.endswith("but the optimizer is Lamb; for Lamb, use one of sqrt, legw")


def test_a_subclass_is_judged_by_its_nearest_known_base_class() -> None:
    assert warning("adam_sde", ("Mine", "AdamW", "Adam", "Optimizer")) is None
    assert "the optimizer is SGD" in str(warning("surge", ("Mine", "SGD", "Optimizer")))


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 500)), min_size=1, max_size=8),
    st.integers(0, 300),
)
def test_the_batch_rises_without_a_jump_and_falls_at_once(changes: list[tuple[float, int]], rewarm: int) -> None:
    ramp, samples = Ramp(1.0, 1.0), 0
    for end, after in changes:
        samples += after
        before = ramp.at(samples)
        ramp = ramp.towards(end, samples, rewarm)
        at_change = ramp.at(samples)
        is_rising = ramp.end > ramp.begin and samples < ramp.since + ramp.length
        assert at_change == pytest.approx(before if is_rising else ramp.end)
        assert ramp.at(samples + rewarm) == ramp.end
        sizes = [ramp.at(samples + step * rewarm // 4) for step in range(5)]
        assert sizes == sorted(sizes)
        assert ramp.towards(end, samples + 1, rewarm) is ramp
        assert Ramp(**ramp.values()) == ramp


def multipliers(rate: Rate, begin: int, steps: list[int], merged: int) -> list[float]:
    return [rate.at(begin + samples, 8 * merged, merged, Measured()).lr for samples in steps]


def test_a_new_worker_group_continues_from_the_previous_groups_learning_rate() -> None:
    schedule = ScheduleSpec(base_lr=1.0, decay="constant", batch_rule="linear", rewarm_samples=32)
    plan = Plan(ELASTIC, 800)
    first, event = rate_for(schedule, plan, 2, 0, {})
    assert event is not None
    assert multipliers(first, 0, [8], 1) == [1.0]
    grown, event = rate_for(schedule, plan, 4, 10, first.values())
    assert event is not None
    assert (event.samples, event.lr_factor, event.warmup_samples) == (16, 2.0, 32.0)
    assert multipliers(grown, 80, [0, 16, 32, 48], 2) == [1.0, 1.5, 2.0, 2.0]
    assert multipliers(grown, 80, [48], 1) == [1.0]  # the last step of an epoch, with one global batch left
    # After a crash during the re-warmup, a group of the same size continues it.
    again, event = rate_for(schedule, plan, 4, 12, grown.values())
    assert event is None
    assert multipliers(again, 80, [16], 2) == [1.5]
    shrunk, _ = rate_for(schedule, plan, 2, 12, again.values())
    assert multipliers(shrunk, 80, [24], 1) == [1.0]


def test_legw_rewarms_longer_in_proportion_to_the_growth_of_the_batch() -> None:
    schedule = ScheduleSpec(decay="constant", batch_rule="legw", rewarm_samples=32)
    plan = Plan(ELASTIC, 800)
    first, _ = rate_for(schedule, plan, 2, 0, {})
    grown, event = rate_for(schedule, plan, 8, 10, first.values())
    assert event is not None
    assert (event.samples, event.lr_factor, event.warmup_samples) == (32, 2.0, 128.0)
    assert multipliers(grown, 80, [0, 64, 128], 4) == pytest.approx([1.0, sqrt(2.5), 2.0])


def test_the_learning_rate_is_scaled_from_the_base_batch_to_the_batch_of_the_run() -> None:
    plan = Plan(PlanSpec(global_batch=8, virtual_workers=4), 80)
    rate, event = rate_for(ScheduleSpec(decay="constant", base_batch=2), plan, 1, 0, {})
    assert multipliers(rate, 0, [8, 16], 1) == [4.0, 4.0]
    assert event is not None
    assert (event.samples, event.lr_factor, event.warmup_samples) == (8, 4.0, 0.0)
    assert rate_for(ScheduleSpec(base_batch=2), plan, 2, 3, {})[1] is None  # only the first group records the event
    assert rate_for(ScheduleSpec(), plan, 1, 0, {})[1] is None


@pytest.mark.parametrize("rule", list(RULES))
def test_no_rule_changes_a_run_of_the_base_batch(rule: RuleName) -> None:
    plan = Plan(PlanSpec(global_batch=8, virtual_workers=4), 80)
    plain, _ = rate_for(ScheduleSpec(batch_rule="none"), plan, 1, 0, {})
    ruled, _ = rate_for(ScheduleSpec(batch_rule=rule, base_batch=8), plan, 1, 0, {})
    assert multipliers(ruled, 0, [8, 40, 80], 1) == multipliers(plain, 0, [8, 40, 80], 1)


def test_adascales_schedule_advances_by_gains() -> None:
    plan = Plan(PlanSpec(global_batch=8, virtual_workers=4), 80)
    schedule = ScheduleSpec(decay="polynomial", final_fraction=0, base_batch=2, batch_rule="adascale")
    rate, _ = rate_for(schedule, plan, 1, 0, {})
    for noise, gain in (
        (NoiseScale(1.0, 0.0, 1.0), 4.0),
        (NoiseScale(0.0, 1.0, 1.0), 1.0),
        (NoiseScale(8.0, 1.0, 1.0), 2.5),
    ):
        step = rate.at(48, 8, 1, Measured(noise, clock=40.0))  # noise scale 8 samples: 4 base batches
        assert step.clock == 40 + 2 * gain
        assert step.lr == pytest.approx(gain * (1 - step.clock / 80))
    short = rate.at(48, 4, 1, Measured(NoiseScale(8.0, 1.0, 1.0), clock=40.0))
    assert short.clock == 42.5


def test_adams_betas_and_eps_follow_the_batch_and_return_with_it() -> None:
    plan = Plan(PlanSpec(global_batch=8, virtual_workers=8, batch="elastic"), 800)
    schedule = ScheduleSpec(decay="constant", batch_rule="adam_sde")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1, betas=(0.9, 0.999), eps=1e-8)
    rates = GroupRates(optimizer, schedule, plan)
    for world_size, lr, betas, eps in ((4, 0.2, (0.6, 0.996), 5e-9), (1, 0.1, (0.9, 0.999), 1e-8)):
        rate, _ = rate_for(schedule, plan, world_size, 0, {})
        rates.set(optimizer, rate.at(8 * world_size, 8 * world_size, world_size, Measured()))
        (group,) = optimizer.param_groups
        assert (group["lr"], group["eps"]) == (pytest.approx(lr), pytest.approx(eps))
        assert group["betas"] == pytest.approx(betas)


def test_other_rules_do_not_change_the_betas() -> None:
    plan = Plan(PlanSpec(global_batch=8, virtual_workers=8, batch="elastic"), 800)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    rates = GroupRates(optimizer, ScheduleSpec(batch_rule="sqrt"), plan)
    optimizer.param_groups[0]["betas"] = (0.8, 0.9)  # as a script may do in the middle of a run
    rates.set(optimizer, rate_for(ScheduleSpec(batch_rule="sqrt"), plan, 4, 0, {})[0].at(32, 32, 4, Measured()))
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_betas_that_would_become_negative_are_refused_before_the_first_step() -> None:
    plan = Plan(PlanSpec(global_batch=16, virtual_workers=16, batch="elastic"), 800)
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    schedule = ScheduleSpec(batch_rule="adam_sde")
    with pytest.raises(SpecError, match=r"adam_sde .* below 10 times schedule.base_batch"):
        GroupRates(torch.optim.Adam(parameters), schedule, plan)
    GroupRates(torch.optim.Adam(parameters, betas=(0.95, 0.999)), schedule, plan)
    with pytest.raises(SpecError, match=r"with a beta of 0.9 "):
        GroupRates(torch.optim.RMSprop(parameters, alpha=0.9), schedule, plan)
    GroupRates(torch.optim.SGD(parameters), schedule, plan)


def test_torchs_sgd_needs_no_momentum_correction() -> None:
    """The updates equal equation 10 of Goyal et al. 2017, which corrects the buffer by lr / previous lr, at every step."""
    torch.manual_seed(0)
    gradients = torch.randn(12, 3, dtype=torch.float64)
    weights = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    expected, buffer, former = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0.1
    for number, gradient in enumerate(gradients):
        lr = 0.1 * Ramp(1.0, 4.0, 3, 5).at(number)
        optimizer.param_groups[0]["lr"] = lr
        weights.grad = gradient.clone()
        optimizer.step()
        buffer = 0.9 * (lr / former) * buffer + lr * gradient
        expected, former = expected - buffer, lr
        torch.testing.assert_close(weights.detach(), expected)
