"""Tests of measured rates: their fit, their file, and the durations that follow from them."""

import math

import pytest

from undula.plan.memory import PassCount
from undula.plan.rates import MeasuredRates, TimedPass, fit_rates, read_rates
from undula.plan.scaling import Link
from undula.plan.step_time import DeviceRates, passes_s

FLOPS, BYTES, OPERATION_S, CONVOLUTION_S = 50e9, 4e9, 20e-6, 1e-3
COUNTS = ((1e9, 1e8, 100, 0), (1e10, 2e8, 80, 0), (5e8, 5e8, 200, 0), (1e9, 2e8, 100, 20))


def seconds(rates: DeviceRates, flops: float, moved: float, operations: int, convolutions: int = 0) -> float:
    passes = PassCount(1, 0, 0, 0, 0, 0, int(flops), int(moved), operations, convolutions)
    return passes_s(passes, rates)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_rates_of_exact_passes_are_recovered(is_async: bool) -> None:
    true = DeviceRates(FLOPS, BYTES, OPERATION_S, CONVOLUTION_S, is_async)
    timed = [TimedPass(*each, seconds(true, *each)) for each in COUNTS]
    fitted = fit_rates(timed, OPERATION_S, is_async)
    assert fitted.flops_per_s == pytest.approx(FLOPS)
    assert fitted.bytes_per_s == pytest.approx(BYTES)
    assert fitted.convolution_s == pytest.approx(CONVOLUTION_S)
    assert (fitted.operation_s, fitted.is_async) == (OPERATION_S, is_async)


def test_noise_of_three_percent_moves_a_prediction_by_less_than_five() -> None:
    true = DeviceRates(FLOPS, BYTES, OPERATION_S, CONVOLUTION_S, is_async=False)
    noise = (1.03, 0.97, 1.02, 0.98)
    timed = [TimedPass(*each, seconds(true, *each) * off) for each, off in zip(COUNTS, noise, strict=True)]
    fitted = fit_rates(timed, OPERATION_S, is_async=False)
    for each in COUNTS:
        assert seconds(fitted, *each) == pytest.approx(seconds(true, *each), rel=0.05)


def test_rates_that_one_kind_of_operation_explains_are_not_negative() -> None:
    timed = [TimedPass(flops, 1e6 / flops, 10, 0, flops / FLOPS) for flops in (1e9, 2e9, 4e9)]
    fitted = fit_rates(timed, 0.0, is_async=True)
    assert fitted.flops_per_s == pytest.approx(FLOPS, rel=1e-6)
    assert fitted.bytes_per_s == math.inf or fitted.bytes_per_s > 0


def test_a_device_that_waits_for_the_host_takes_as_long_as_the_host() -> None:
    small = (1e6, 1e5, 1000)
    assert seconds(DeviceRates(FLOPS, BYTES, OPERATION_S), *small) == pytest.approx(1000 * OPERATION_S)
    both = 1000 * OPERATION_S + 1e6 / FLOPS + 1e5 / BYTES
    assert seconds(DeviceRates(FLOPS, BYTES, OPERATION_S, is_async=False), *small) == pytest.approx(both)


@pytest.mark.parametrize("link", [None, Link(1e-4, 1.25e9)])
def test_a_file_of_rates_is_read_as_it_was_written(link: Link | None) -> None:
    rates = MeasuredRates("L4", 22.0, {"fp32": DeviceRates(1e13, 3e11, 8e-6)}, link)
    assert read_rates(rates.as_json()) == rates


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"device": "x", "memory_bytes": 1, "rates": {"fp32": {}}, "link": null}']
)
def test_a_file_with_other_content_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Error:|Expecting"):
        read_rates(text)
