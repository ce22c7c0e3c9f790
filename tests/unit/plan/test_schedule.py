"""The learning-rate schedule, clocked in samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from undula.plan.schedule import ScheduleSpec

TOTAL = 100_000


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleSpec:
    return ScheduleSpec(
        warmup_samples=draw(st.integers(0, TOTAL - 1)),
        decay=draw(st.sampled_from(["cosine", "constant"])),
        final_fraction=draw(st.floats(0, 1)),
    )


@given(schedules(), st.integers(1, TOTAL))
def test_multiplier_is_never_above_one_nor_below_the_end(spec: ScheduleSpec, samples: int) -> None:
    multiplier = spec.multiplier(samples, TOTAL)
    assert 0 <= multiplier <= 1 + 1e-12
    if samples >= spec.warmup_samples:
        assert multiplier >= spec.final_fraction - 1e-12


@given(schedules(), st.integers(1, TOTAL - 1))
def test_multiplier_is_continuous(spec: ScheduleSpec, samples: int) -> None:
    steepest = max(1 / max(spec.warmup_samples, 1), 2 / (TOTAL - spec.warmup_samples))
    assert abs(spec.multiplier(samples + 1, TOTAL) - spec.multiplier(samples, TOTAL)) <= steepest + 1e-12


@given(st.integers(1, TOTAL), st.integers(1, TOTAL))
def test_warmup_climbs_linearly_to_the_top(warmup: int, samples: int) -> None:
    spec = ScheduleSpec(warmup_samples=warmup)
    assert spec.multiplier(warmup, TOTAL) == 1.0
    if samples < warmup:
        assert spec.multiplier(samples, TOTAL) == samples / warmup


@given(st.integers(0, TOTAL - 1), st.floats(0, 1))
def test_cosine_falls_all_the_way_and_ends_at_the_final_fraction(warmup: int, final: float) -> None:
    spec = ScheduleSpec(warmup_samples=warmup, final_fraction=final)
    points = [warmup + (TOTAL - warmup) * tenth // 10 for tenth in range(11)]
    multipliers = [spec.multiplier(point, TOTAL) for point in points]
    assert multipliers == sorted(multipliers, reverse=True)
    assert multipliers[0] == pytest.approx(1)
    assert multipliers[-1] == pytest.approx(final)
    assert spec.multiplier(TOTAL + 1000, TOTAL) == pytest.approx(final)


def test_cosine_is_half_way_down_in_the_middle() -> None:
    spec = ScheduleSpec(warmup_samples=2000, final_fraction=0.2)
    assert spec.multiplier(6000, 10_000) == pytest.approx(0.6)


@given(st.integers(0, TOTAL), st.integers(1, 2 * TOTAL))
def test_constant_holds_the_top_after_the_warmup(warmup: int, samples: int) -> None:
    spec = ScheduleSpec(warmup_samples=warmup, decay="constant")
    assert spec.multiplier(samples, TOTAL) == min(samples / warmup if warmup else 1, 1)


def test_run_that_ends_in_its_warmup_never_falls() -> None:
    spec = ScheduleSpec(warmup_samples=1000)
    multipliers = [spec.multiplier(samples, 500) for samples in (1, 250, 500)]
    assert multipliers == [0.001, 0.25, 0.5]
    assert spec.multiplier(1000, 1000) == 1.0


def test_schedule_means_the_same_at_any_batch_size() -> None:
    spec = ScheduleSpec(warmup_samples=640)
    small = [spec.multiplier(step * 32, 6400) for step in range(2, 201, 2)]
    large = [spec.multiplier(step * 64, 6400) for step in range(1, 101)]
    assert small == large


@pytest.mark.parametrize(
    "field",
    [{"base_lr": 0.0}, {"base_lr": -1.0}, {"base_lr": float("nan")}, {"final_fraction": 1.1}, {"warmup_samples": -1}],
)
def test_values_without_a_meaning_are_refused(field: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ScheduleSpec(**field)
