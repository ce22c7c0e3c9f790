"""Tests of the learning-rate schedule, which advances by samples."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from undula.plan.plan import Plan, PlanSpec
from undula.plan.schedule import Schedule, ScheduleSpec

TOTAL = 100_000


def over(total: int, **keys: Any) -> Schedule:
    """Return the schedule of a run of `total` samples, with steps of one sample."""
    spec = ScheduleSpec(**keys)
    return Schedule(spec, spec.warmup_samples or 0, total)


@st.composite
def schedules(draw: st.DrawFn, **fixed: Any) -> Schedule:
    keys: dict[str, Any] = {
        "decay": draw(st.sampled_from(["cosine", "constant", "step", "polynomial", "inverse_sqrt", "wsd"])),
        "final_fraction": draw(st.floats(0, 1)),
        "warmup": draw(st.sampled_from(["linear", "exponential", "constant"])),
        **fixed,
    }
    keys["warmup_samples"] = draw(st.integers(keys["decay"] == "inverse_sqrt", TOTAL - 1))
    if keys["warmup_samples"]:
        keys["warmup_begin"] = draw(st.floats(1e-3, 0.9))
    if keys["decay"] == "step":
        keys["decay_at"] = sorted(draw(st.sets(st.floats(0.01, 0.99), min_size=1, max_size=4)))
        keys["decay_factor"] = draw(st.floats(0.05, 0.9))
    if keys["decay"] in ("polynomial", "wsd"):
        keys["decay_power"] = draw(st.floats(1, 3))
    if keys["decay"] == "wsd":
        keys["decay_fraction"] = draw(st.floats(0.01, 1))
    return over(TOTAL, **keys)


@given(schedules(), st.integers(1, 2 * TOTAL))
def test_the_multiplier_is_never_above_one_nor_below_the_final_fraction(schedule: Schedule, samples: int) -> None:
    multiplier = schedule.multiplier(samples)
    assert 0 <= multiplier <= 1 + 1e-12
    if samples > schedule.warmup_samples and schedule.spec.decay in ("cosine", "polynomial", "wsd"):
        assert multiplier >= schedule.spec.final_fraction - 1e-12


@given(schedules(), st.integers(0, TOTAL - 1))
def test_the_multiplier_jumps_at_steps_and_after_a_constant_warmup_only(schedule: Schedule, samples: int) -> None:
    spec, warmup = schedule.spec, schedule.warmup_samples
    here, there = schedule.multiplier(samples), schedule.multiplier(samples + 1)
    jumps = spec.decay == "step" and any(samples - 1 < place * TOTAL <= samples + 1 for place in spec.decay_at)
    if jumps or (spec.warmup == "constant" and samples - 1 < warmup <= samples + 1):
        return
    begin = max(warmup, TOTAL * (1 - spec.decay_fraction)) if spec.decay == "wsd" else warmup
    # Over a whole warmup, `exponential` has a slope of at most ln(1 / begin); over a whole decay, a power p has a slope of at most p.
    steepest = 7 / max(warmup, 1) + max(2.0, spec.decay_power) / (TOTAL - begin)
    assert abs(there - here) <= steepest + 1e-12


@given(schedules(), st.integers(1, TOTAL), st.integers(1, TOTAL))
def test_the_multiplier_rises_in_the_warmup_and_never_after_it(schedule: Schedule, one: int, other: int) -> None:
    earlier, later = sorted((one, other))
    if later < schedule.warmup_samples:
        assert schedule.multiplier(earlier) <= schedule.multiplier(later) + 1e-12
    elif earlier > schedule.warmup_samples:
        assert schedule.multiplier(earlier) >= schedule.multiplier(later) - 1e-12


@given(st.integers(1, TOTAL), st.integers(1, TOTAL))
def test_a_linear_warmup_rises_in_proportion_to_the_samples(warmup: int, samples: int) -> None:
    schedule = over(TOTAL, warmup_samples=warmup)
    assert schedule.multiplier(warmup) == 1.0
    if samples < warmup:
        assert schedule.multiplier(samples) == samples / warmup


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        ("constant", [0.01, 0.01, 0.01, 0.01, 1]),
        ("linear", [0.01, 0.505, 0.7525, 1, 1]),
        ("exponential", [0.01, 0.1, 0.1**0.5, 1, 1]),
    ],
)
def test_warmups_start_at_warmup_begin_and_end_at_the_peak(warmup: Any, expected: list[float]) -> None:
    schedule = over(TOTAL, decay="constant", warmup=warmup, warmup_samples=1000, warmup_begin=0.01)
    assert [schedule.multiplier(samples) for samples in (0, 500, 750, 1000, 1001)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("keys", "at", "expected"),
    [
        ({"decay": "constant"}, [0, 5000, 10_000], [1, 1, 1]),
        ({"final_fraction": 0.2, "warmup_samples": 2000}, [2000, 6000, 10_000, 11_000], [1, 0.6, 0.2, 0.2]),
        ({"decay": "step", "decay_at": (0.5, 0.75)}, [5000, 5001, 7500, 7501], [1, 0.1, 0.1, 0.01]),
        ({"decay": "polynomial", "final_fraction": 0}, [0, 2500, 5000, 10_000], [1, 0.75, 0.5, 0]),
        ({"decay": "polynomial", "decay_power": 2.0, "final_fraction": 0.2}, [5000, 10_000], [0.4, 0.2]),
        ({"decay": "inverse_sqrt", "warmup_samples": 400}, [400, 1600, 6400], [1, 0.5, 0.25]),
        ({"decay": "wsd", "decay_fraction": 0.2, "final_fraction": 0}, [100, 8000, 9000, 10_000], [1, 1, 0.5, 0]),
        ({"decay": "wsd", "decay_fraction": 0.5, "warmup_samples": 8000}, [8000, 10_000], [1, 0.1]),
    ],
)
def test_decays_take_their_known_values(keys: dict[str, Any], at: list[int], expected: list[float]) -> None:
    schedule = over(10_000, **keys)
    assert [schedule.multiplier(samples) for samples in at] == pytest.approx(expected)


@given(st.integers(0, TOTAL - 1), st.floats(0, 1), st.sampled_from(["cosine", "polynomial", "wsd"]))
def test_decays_fall_monotonically_to_the_final_fraction(warmup: int, final: float, decay: Any) -> None:
    schedule = over(TOTAL, warmup_samples=warmup, final_fraction=final, decay=decay)
    points = [warmup + (TOTAL - warmup) * tenth // 10 for tenth in range(11)]
    multipliers = [schedule.multiplier(point) for point in points]
    assert multipliers == sorted(multipliers, reverse=True)
    assert multipliers[0] == pytest.approx(1)
    assert multipliers[-1] == pytest.approx(final)
    assert schedule.multiplier(TOTAL + 1000) == pytest.approx(final)


def test_a_run_that_ends_in_its_warmup_never_decays() -> None:
    schedule = over(500, warmup_samples=1000)
    assert [schedule.multiplier(samples) for samples in (1, 250, 500)] == [0.001, 0.25, 0.5]
    assert over(1000, warmup_samples=1000).multiplier(1000) == 1.0


@given(schedules(), st.sampled_from([16, 32, 64, 128]))
def test_the_schedule_does_not_depend_on_the_batch_size(drawn: Schedule, batch: int) -> None:
    """The learning rate depends on the number of consumed samples alone."""
    rows = 12_800
    spec = PlanSpec(global_batch=batch, epochs=2)
    schedule = drawn.spec.over(Plan(spec, rows))
    as_small = drawn.spec.over(Plan(PlanSpec(global_batch=16, epochs=2), rows))
    assert schedule == as_small
    steps = range(128 // batch, 2 * rows // batch + 1, 128 // batch)
    assert [schedule.multiplier(step * batch) for step in steps] == [
        as_small.multiplier(samples) for samples in range(128, 2 * rows + 1, 128)
    ]


def test_a_warmup_can_be_given_in_samples_epochs_or_steps_of_the_base_batch() -> None:
    plan = Plan(PlanSpec(global_batch=64), 1000)
    for keys, expected in (
        ({"warmup_samples": 500}, 500),
        ({"warmup_epochs": 0.5}, 500),
        ({"warmup_steps": 10}, 640),
        ({"warmup_steps": 10, "base_batch": 32}, 320),
        ({"warmup_steps": 10, "base_batch": 32, "batch_rule": "legw"}, 640),  # twice the batch, twice as long
        ({}, 0),
    ):
        assert ScheduleSpec(**keys).over(plan).warmup_samples == expected
    assert ScheduleSpec().over(plan).total_samples == 1000
    assert ScheduleSpec(decay_samples=800).over(plan).multiplier(800) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "field",
    [
        {"base_lr": 0.0},
        {"base_lr": -1.0},
        {"base_lr": float("nan")},
        {"final_fraction": 1.1},
        {"warmup_samples": -1},
        {"base_batch": 0},
        {"warmup_epochs": 0.0},
        {"decay": "exponential"},
    ],
)
def test_values_out_of_range_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ScheduleSpec(**field)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"warmup_epochs": 1.0, "warmup_steps": 5}, ("warmup_steps and warmup_epochs", "remove one")),
        ({"warmup": "exponential", "warmup_steps": 5}, ("warmup is exponential", "set warmup_begin")),
        ({"warmup_begin": 0.5}, ("warmup_begin is 0.5", "set warmup_epochs")),
        ({"decay": "inverse_sqrt"}, ("decay is inverse_sqrt", "set warmup_epochs")),
        ({"decay": "step"}, ("decay_at is missing", "such as [0.5, 0.75]")),
        ({"decay": "step", "decay_at": (0.5, 0.4)}, ("decay_at is [0.5, 0.4]", "ascending fractions")),
        ({"decay": "step", "decay_at": (30, 60)}, ("decay_at is [30.0, 60.0]", "between 0 and 1")),
        ({"decay_at": (0.5,)}, ("decay_at has no effect with decay=cosine", "set decay=step")),
        ({"decay_power": 2.0, "decay": "constant"}, ("decay_power has no effect with decay=constant", "set decay=polynomial")),
        ({"decay_fraction": 0.2}, ("decay_fraction has no effect with decay=cosine", "set decay=wsd")),
    ],
)  # fmt: skip
def test_contradicting_keys_are_refused_with_the_key_and_the_fix(keys: dict[str, Any], parts: tuple[str, str]) -> None:
    with pytest.raises(ValidationError) as refusal:
        ScheduleSpec(**keys)
    message = refusal.value.errors()[0]["msg"]
    assert all(part in message for part in parts), message
