"""The learning-rate schedule, clocked in samples."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from undula.plan.plan import Plan, PlanSpec
from undula.plan.schedule import Schedule, ScheduleSpec

TOTAL = 100_000


def over(total: int, **keys: Any) -> Schedule:
    """A schedule of a run of so many samples, with steps of one sample."""
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
def test_multiplier_is_never_above_one_nor_below_the_end(schedule: Schedule, samples: int) -> None:
    multiplier = schedule.multiplier(samples)
    assert 0 <= multiplier <= 1 + 1e-12
    if samples >= schedule.warmup_samples and schedule.spec.decay in ("cosine", "polynomial", "wsd"):
        assert multiplier >= schedule.spec.final_fraction - 1e-12


@given(schedules(), st.integers(0, TOTAL - 1))
def test_multiplier_jumps_where_it_is_to_and_nowhere_else(schedule: Schedule, samples: int) -> None:
    spec, warmup = schedule.spec, schedule.warmup_samples
    here, there = schedule.multiplier(samples), schedule.multiplier(samples + 1)
    jumps = spec.decay == "step" and any(samples < place * TOTAL <= samples + 1 for place in spec.decay_at)
    if jumps or (spec.warmup == "constant" and samples < warmup <= samples + 1):
        return
    begin = max(warmup, TOTAL * (1 - spec.decay_fraction)) if spec.decay == "wsd" else warmup
    # exponential climbs by at most ln(1 / begin) of itself in a warmup; a power p falls by at most p of itself in a decay
    steepest = 7 / max(warmup, 1) + max(2.0, spec.decay_power) / (TOTAL - begin)
    assert abs(there - here) <= steepest + 1e-12


@given(schedules(), st.integers(1, TOTAL), st.integers(1, TOTAL))
def test_it_climbs_in_the_warmup_and_never_after_it(schedule: Schedule, one: int, other: int) -> None:
    earlier, later = sorted((one, other))
    if later < schedule.warmup_samples:
        assert schedule.multiplier(earlier) <= schedule.multiplier(later) + 1e-12
    elif earlier >= schedule.warmup_samples:
        assert schedule.multiplier(earlier) >= schedule.multiplier(later) - 1e-12


@given(st.integers(1, TOTAL), st.integers(1, TOTAL))
def test_warmup_climbs_linearly_to_the_top(warmup: int, samples: int) -> None:
    schedule = over(TOTAL, warmup_samples=warmup)
    assert schedule.multiplier(warmup) == 1.0
    if samples < warmup:
        assert schedule.multiplier(samples) == samples / warmup


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        ("constant", [0.01, 0.01, 0.01, 1]),
        ("linear", [0.01, 0.505, 0.7525, 1]),
        ("exponential", [0.01, 0.1, 0.1**0.5, 1]),
    ],
)
def test_warmups_begin_where_they_are_told_and_end_at_the_top(warmup: Any, expected: list[float]) -> None:
    schedule = over(TOTAL, warmup=warmup, warmup_samples=1000, warmup_begin=0.01)
    assert [schedule.multiplier(samples) for samples in (0, 500, 750, 1000)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("keys", "at", "expected"),
    [
        ({"decay": "constant"}, [0, 5000, 10_000], [1, 1, 1]),
        ({"final_fraction": 0.2, "warmup_samples": 2000}, [2000, 6000, 10_000, 11_000], [1, 0.6, 0.2, 0.2]),
        ({"decay": "step", "decay_at": (0.5, 0.75)}, [4999, 5000, 7499, 7500], [1, 0.1, 0.1, 0.01]),
        ({"decay": "polynomial", "final_fraction": 0}, [0, 2500, 5000, 10_000], [1, 0.75, 0.5, 0]),
        ({"decay": "polynomial", "decay_power": 2.0, "final_fraction": 0.2}, [5000, 10_000], [0.4, 0.2]),
        ({"decay": "inverse_sqrt", "warmup_samples": 400}, [400, 1600, 6400], [1, 0.5, 0.25]),
        ({"decay": "wsd", "decay_fraction": 0.2, "final_fraction": 0}, [100, 8000, 9000, 10_000], [1, 1, 0.5, 0]),
        ({"decay": "wsd", "decay_fraction": 0.5, "warmup_samples": 8000}, [8000, 10_000], [1, 0.1]),
    ],
)
def test_decays_pass_through_their_points(keys: dict[str, Any], at: list[int], expected: list[float]) -> None:
    schedule = over(10_000, **keys)
    assert [schedule.multiplier(samples) for samples in at] == pytest.approx(expected)


@given(st.integers(0, TOTAL - 1), st.floats(0, 1), st.sampled_from(["cosine", "polynomial", "wsd"]))
def test_decays_fall_all_the_way_and_end_at_the_final_fraction(warmup: int, final: float, decay: Any) -> None:
    schedule = over(TOTAL, warmup_samples=warmup, final_fraction=final, decay=decay)
    points = [warmup + (TOTAL - warmup) * tenth // 10 for tenth in range(11)]
    multipliers = [schedule.multiplier(point) for point in points]
    assert multipliers == sorted(multipliers, reverse=True)
    assert multipliers[0] == pytest.approx(1)
    assert multipliers[-1] == pytest.approx(final)
    assert schedule.multiplier(TOTAL + 1000) == pytest.approx(final)


def test_run_that_ends_in_its_warmup_never_falls() -> None:
    schedule = over(500, warmup_samples=1000)
    assert [schedule.multiplier(samples) for samples in (1, 250, 500)] == [0.001, 0.25, 0.5]
    assert over(1000, warmup_samples=1000).multiplier(1000) == 1.0


@given(schedules(), st.sampled_from([16, 32, 64, 128]))
def test_schedule_means_the_same_at_any_batch_size(drawn: Schedule, batch: int) -> None:
    """Steps of any size that bring the run to the same samples have the same rate: only samples are looked at."""
    rows = 12_800
    spec = PlanSpec(global_batch=batch, epochs=2)
    schedule = drawn.spec.over(Plan(spec, rows))
    as_small = drawn.spec.over(Plan(PlanSpec(global_batch=16, epochs=2), rows))
    assert schedule == as_small
    steps = range(128 // batch, 2 * rows // batch + 1, 128 // batch)
    assert [schedule.multiplier(step * batch) for step in steps] == [
        as_small.multiplier(samples) for samples in range(128, 2 * rows + 1, 128)
    ]


def test_lengths_are_given_in_samples_epochs_or_steps_of_the_base_batch() -> None:
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
def test_values_without_a_meaning_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ScheduleSpec(**field)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"warmup_epochs": 1.0, "warmup_steps": 5},
            "warmup_steps and warmup_epochs both give the length of the warmup: leave out one of them",
        ),
        (
            {"warmup": "exponential", "warmup_steps": 5},
            "warmup is exponential, which does not leave the 0 that warmup_begin is: give a fraction, such as base_batch over "
            "plan.global_batch",
        ),
        ({"warmup_begin": 0.5}, "warmup_begin is 0.5, and there is no warmup: give warmup_epochs"),
        (
            {"decay": "inverse_sqrt"},
            "decay is inverse_sqrt, which counts in warmups, and there is none: give warmup_epochs",
        ),
        (
            {"decay": "step"},
            "decay_at is missing, which says where decay: step falls: give fractions, such as [0.5, 0.75]",
        ),
        (
            {"decay": "step", "decay_at": (0.5, 0.4)},
            "decay_at is [0.5, 0.4]: give ascending fractions of the run, between 0 and 1",
        ),
        (
            {"decay": "step", "decay_at": (30, 60)},
            "decay_at is [30.0, 60.0]: give ascending fractions of the run, between 0 and 1",
        ),
        (
            {"decay_at": (0.5,)},
            "decay_at is given, which decay: cosine does not have: leave it out, or give decay: step",
        ),
        (
            {"decay_power": 2.0, "decay": "constant"},
            "decay_power is given, which decay: constant does not have: leave it out, or give decay: polynomial",
        ),
        (
            {"decay_fraction": 0.2},
            "decay_fraction is given, which decay: cosine does not have: leave it out, or give decay: wsd",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused_in_a_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        ScheduleSpec(**keys)
    assert refusal.value.errors()[0]["msg"] == f"Value error, {sentence}"
