"""Tests of the mix: the data set of a sample is known at any position, and the proportions are even and as requested."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.data.stored.mixture import PERIOD, Mix
from undula.errors import SpecError

weights = st.lists(st.floats(0.01, 100), min_size=2, max_size=6).map(tuple)


@given(weights=weights, seed=st.integers(0, 99), position=st.integers(0, 10**12), count=st.integers(0, 500))
def test_counts_are_the_sums_of_the_sources(weights: tuple[float, ...], seed: int, position: int, count: int) -> None:
    mix = Mix(weights, seed)
    sources = mix.sources(3, position, count)
    counted = np.bincount(sources, minlength=len(weights))
    assert np.array_equal(mix.counts(3, position + count) - mix.counts(3, position), counted)
    assert not mix.counts(3, 0).any()


@given(weights=weights, position=st.integers(0, 10**9), count=st.integers(1, 2000))
def test_any_range_holds_each_data_set_in_its_proportion(weights: tuple[float, ...], position: int, count: int) -> None:
    counts = np.bincount(Mix(weights, 0).sources(0, position, count), minlength=len(weights))
    asked = np.array(weights) / sum(weights) * count
    assert np.abs(counts - asked).max() <= 2 * len(weights)
    assert counts.sum() == count


def test_virtual_workers_do_not_all_draw_from_one_data_set_at_once() -> None:
    mix = Mix((1.0, 1.0), seed=5)
    step = [int(mix.sources(virtual_worker, 0, 1)[0]) for virtual_worker in range(64)]
    assert 16 <= sum(step) <= 48


def test_a_period_holds_exactly_the_rounded_weights() -> None:
    assert Mix((2.0, 1.0, 1.0), 0).counts(7, PERIOD).tolist() == [PERIOD // 2, PERIOD // 4, PERIOD // 4]


def test_a_weight_of_less_than_one_sample_per_period_is_refused() -> None:
    with pytest.raises(SpecError, match=r"data\.mix: .* data set 2 is 1e-06 of 1\.0.*, less than one sample in 65536"):
        Mix((1.0, 1e-6), 0)
