"""Tests of the laws of scaling: their values, and what is fitted to noisy measurements."""

import numpy as np
import pytest

from undula.plan.scaling import Link, amdahl, fit_amdahl, fit_gustafson, fit_link, gustafson, student_quantile

SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("parallel", "speedups"), [(0.99, (1.980, 3.883, 7.477, 39.26)), (0.9, (1.818, 3.077, 4.706, 8.767))]
)
def test_amdahls_speedups(parallel: float, speedups: tuple[float, ...]) -> None:
    assert [amdahl(parallel, workers) for workers in (2, 4, 8, 64)] == pytest.approx(speedups, rel=2e-4)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 6.3138), (2, 2.9200), (3, 2.3534), (4, 2.1318), (9, 1.8331), (30, 1.6973)]
)
def test_quantiles_are_those_of_students_table(freedom: int, quantile: float) -> None:
    assert student_quantile(0.9, freedom) == pytest.approx(quantile, abs=5e-5)


@pytest.mark.parametrize("parallel", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("law", ["amdahl", "gustafson"])
def test_the_parallel_share_is_within_its_interval_as_often_as_this_says(parallel: float, law: str) -> None:
    chance = np.random.default_rng(1)
    workers = [size for size in SIZES for _ in range(5)]
    found = 0
    for _ in range(100):
        noise = np.exp(0.03 * chance.standard_normal(len(workers)))
        if law == "amdahl":
            share = fit_amdahl(workers, [7 / amdahl(parallel, each) for each in workers] * noise)
        else:
            share = fit_gustafson(workers, [7 * each / gustafson(parallel, each) for each in workers] * noise)
        found += share.low <= parallel <= share.high
        assert share.low <= share.value <= share.high
    assert found >= 84  # 90 are expected, with a deviation of 3


@pytest.mark.parametrize("link", [Link(1e-3, 12.5e6), Link(1e-2, 125e6), Link(5e-5, 1e10)])
def test_a_link_is_recovered_from_messages(link: Link) -> None:
    chance = np.random.default_rng(2)
    sizes = np.repeat([2**10, 2**14, 2**18, 2**22, 2**26], 9)
    fitted = fit_link(
        sizes, [link.message_s(size) for size in sizes] * np.exp(0.03 * chance.standard_normal(len(sizes)))
    )
    assert fitted.latency_s == pytest.approx(link.latency_s, rel=0.05)
    assert fitted.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.05)


def test_an_exchange_takes_as_long_as_a_ring_where_each_worker_has_one_subtree() -> None:
    link = Link(0.0, 1e9)
    for virtual_workers, workers in ((4, 2), (4, 4), (8, 2), (8, 4), (6, 3)):
        assert link.exchange_s(1e9, virtual_workers, workers) == pytest.approx(link.ring_s(1e9, workers))
    assert link.exchange_s(1e9, 6, 2) == pytest.approx(1.5 * link.ring_s(1e9, 2))
    assert link.exchange_s(1e9, 4, 1) == 0
