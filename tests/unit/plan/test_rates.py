"""Tests of measured rates: their fit, their file, and the durations that follow from them."""

import math
from dataclasses import astuple, replace

import pytest

from undula.plan.rates import MeasuredRates, TimedPass, fit_rates, read_rates
from undula.plan.scaling import Link
from undula.plan.work import DeviceRates, Work

TRUE = DeviceRates(50e9, 4e9, 20e-6, 1e-3, 2e-9, is_async=False)
WORKS = (
    Work(1e9, 1e8, 100),
    Work(1e10, 2e8, 80),
    Work(5e8, 5e8, 200),
    Work(1e9, 2e8, 100, 20, 1e6),
    Work(1e9, 2e8, 100, 9, 9e6),
)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_rates_of_exact_passes_are_recovered(is_async: bool) -> None:
    true = replace(TRUE, is_async=is_async)
    fitted = fit_rates([TimedPass(work, true.seconds(work)) for work in WORKS], TRUE.operation_s, is_async)
    assert astuple(fitted) == pytest.approx(astuple(true))


def test_noise_of_three_percent_moves_a_prediction_by_less_than_five() -> None:
    noise = (1.03, 0.97, 1.02, 0.98, 1.01)
    timed = [TimedPass(work, TRUE.seconds(work) * off) for work, off in zip(WORKS, noise, strict=True)]
    fitted = fit_rates(timed, TRUE.operation_s, is_async=False)
    for work in WORKS:
        assert fitted.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.05)


def test_rates_that_one_kind_of_operation_explains_are_not_negative() -> None:
    timed = [TimedPass(Work(flops, 1e6 / flops, 10), flops / 50e9) for flops in (1e9, 2e9, 4e9)]
    fitted = fit_rates(timed, 0.0, is_async=True)
    assert fitted.flops_per_s == pytest.approx(50e9, rel=1e-6)
    assert fitted.bytes_per_s == math.inf or fitted.bytes_per_s > 0


def test_a_device_that_waits_for_the_host_takes_as_long_as_the_host() -> None:
    small = Work(1e6, 1e5, 1000)
    assert replace(TRUE, is_async=True).seconds(small) == pytest.approx(1000 * TRUE.operation_s)
    assert TRUE.seconds(small) == pytest.approx(1000 * TRUE.operation_s + 1e6 / 50e9 + 1e5 / 4e9)


@pytest.mark.parametrize("work", WORKS)
def test_workers_slow_each_other_down_up_to_a_full_node(work: Work) -> None:
    slow = DeviceRates(25e9, 1e9, 60e-6, 2e-3, 9e-9, is_async=False)
    rates = MeasuredRates("CPU", 22.0, 1.0, {"fp32": TRUE}, {"fp32": slow}, 3, None)
    alone, full = TRUE.seconds(work), slow.seconds(work)
    expected = (alone, (alone + full) / 2, full, full)
    assert [rates.of("fp32", workers).seconds(work) for workers in (1, 2, 3, 7)] == pytest.approx(expected)


def test_rates_that_are_not_known_stay_so() -> None:
    unknown = DeviceRates(50e9, math.inf)
    assert unknown.mixed(unknown, 0.5) == unknown


@pytest.mark.parametrize("link", [None, Link(1e-4, 1.25e9)])
def test_a_file_of_rates_is_read_as_it_was_written(link: Link | None) -> None:
    rates = MeasuredRates("L4", 22.0, 1.0, {"fp32": TRUE}, {"fp32": DeviceRates(1e13, 3e11, 8e-6)}, 8, link)
    assert read_rates(rates.as_json()) == rates


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"device": "x", "memory_bytes": 1, "rates": {"fp32": {}}, "link": null}']
)
def test_a_file_with_other_content_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Error:|Expecting"):
        read_rates(text)
