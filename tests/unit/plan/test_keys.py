"""Tests of keys and permutations. They must be the same on every machine and in every version, or no run could be repeated."""

from collections.abc import Sequence
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.plan.keys import key64, multiset_digest, permuted, subkeys

KEYS = st.integers(0, 2**64 - 1)
IDS = st.lists(st.integers(0, 2**40), max_size=30)


def ids(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_keys_never_change_between_versions() -> None:
    assert key64() == 13020603013274838756
    assert key64("validation", 0) == 9061410155417461602
    assert key64("row groups", 0, 1) == 5910924825573659972


def test_keys_depend_on_parts_types_and_order() -> None:
    parts = [("a", "b"), ("b", "a"), ("ab",), ("a", "b", ""), (1, 2), (12,), ("1", "2"), (1, "2"), (-1,), (1,)]
    assert len({key64(*key) for key in parts}) == len(parts)


@given(st.lists(st.integers() | st.text(max_size=5), max_size=4))
def test_keys_have_64_bits(parts: list[int | str]) -> None:
    assert 0 <= key64(*parts) < 2**64


def whole(size: int, key: int) -> list[int]:
    """Return a whole permutation."""
    return permuted(np.arange(size), size, key).tolist()


def test_permutations_never_change_between_versions() -> None:
    assert whole(10, 0) == [5, 4, 9, 1, 3, 6, 7, 8, 2, 0]
    assert whole(12, 2**64 - 1) == [1, 8, 5, 2, 10, 6, 3, 7, 9, 0, 11, 4]
    long = permuted(np.arange(100_000), 100_000, 42).astype("<i8").tobytes()
    assert sha256(long).hexdigest() == "f690aabc7ed8abec2b44b18ef6ba57ab22292a61d4cd4346432ab85729f292dc"


@given(st.integers(0, 200), KEYS)
def test_permutation_holds_each_number_once(size: int, key: int) -> None:
    assert sorted(whole(size, key)) == list(range(size))


@given(st.lists(st.tuples(st.integers(1, 2**62), KEYS, st.integers(0)), min_size=1, max_size=20))
def test_places_of_several_permutations_can_be_evaluated_at_once(asked: list[tuple[int, int, int]]) -> None:
    sizes, keys, places = zip(*[(size, key, place % size) for size, key, place in asked], strict=True)
    together = permuted(ids(places), ids(sizes), np.array(keys, dtype=np.uint64))
    alone = [int(permuted(place, size, key)) for size, key, place in zip(sizes, keys, places, strict=True)]
    assert together.tolist() == alone
    assert all(0 <= value < size for value, size in zip(alone, sizes, strict=True))


@given(st.integers(1, 200), KEYS, st.data())
def test_a_single_place_agrees_with_the_whole_permutation(size: int, key: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, size - 1))
    assert permuted(place, size, key) == whole(size, key)[place]


@given(KEYS, KEYS)
def test_permutation_depends_on_the_key(one: int, other: int) -> None:
    assert (whole(50, one) == whole(50, other)) == (one == other)


@pytest.mark.parametrize("size", [3, 7, 10, 30])
def test_every_number_is_at_every_place_equally_often(size: int) -> None:
    draws = 20_000
    keys = subkeys(key64("uniform", size), np.arange(draws))
    drawn = permuted(np.arange(size)[None, :], size, keys[:, None])
    counts = np.array([np.bincount(drawn[:, place], minlength=size) for place in range(size)])
    chi2 = float(((counts - draws / size) ** 2 / (draws / size)).sum())
    freedom = (size - 1) ** 2
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_numbers_at_two_places_are_independent() -> None:
    size, draws = 6, 30_000
    keys = subkeys(key64("pairs"), np.arange(draws))
    drawn = permuted(np.arange(size)[None, :], size, keys[:, None])
    for one, other in [(0, 1), (0, 5), (2, 3)]:
        counts = np.bincount(drawn[:, one] * size + drawn[:, other], minlength=size * size)
        pairs = np.delete(counts, np.arange(size) * (size + 1))  # a permutation has no equal pairs
        expected = draws / (size * (size - 1))
        chi2 = float(((pairs - expected) ** 2 / expected).sum())
        assert chi2 < len(pairs) + 5 * (2 * len(pairs)) ** 0.5


def test_subkeys_depend_on_every_part_and_on_their_order() -> None:
    one, other = np.meshgrid(np.arange(-20, 20), np.arange(-20, 20))
    keys = subkeys(7, one.ravel(), other.ravel())
    assert len(set(keys.tolist())) == 1600
    assert int(subkeys(7, 3, 4)) == subkeys(7, np.array([3]), np.array([4]))[0]
    assert int(subkeys(8, 3, 4)) != int(subkeys(7, 3, 4))


def test_digests_never_change_between_versions() -> None:
    assert multiset_digest(ids([])) == 0
    assert multiset_digest(ids([0])) == 16294208416658607535  # SplitMix64's first output for seed 0
    assert multiset_digest(ids(list(range(10)))) == 7438657777315996608


@given(IDS, st.randoms(use_true_random=False))
def test_digest_does_not_depend_on_order(values: list[int], random: object) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)
    assert multiset_digest(ids(shuffled)) == multiset_digest(ids(values))


@given(IDS, IDS)
def test_digests_of_ranks_add_up(one: list[int], other: list[int]) -> None:
    assert (multiset_digest(ids(one)) + multiset_digest(ids(other))) % 2**64 == multiset_digest(ids(one + other))


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=30), st.integers(0, 2**40), st.data())
def test_a_missing_repeated_or_different_sample_changes_the_digest(
    values: list[int], new: int, data: st.DataObject
) -> None:
    digest = multiset_digest(ids(values))
    place = data.draw(st.integers(0, len(values) - 1))
    assert multiset_digest(ids(values[:place] + values[place + 1 :])) != digest
    assert multiset_digest(ids([*values, values[place]])) != digest
    changed = [*values[:place], new, *values[place + 1 :]]
    assert (multiset_digest(ids(changed)) == digest) == (new == values[place])


@pytest.mark.parametrize("pair", [(0, 0), (3, 3)])
def test_pairs_do_not_cancel(pair: tuple[int, int]) -> None:
    assert multiset_digest(ids(list(pair))) != 0
