"""Keys and permutations: the same on every machine and in every version, or no run could be repeated."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.plan.keys import key64, multiset_digest, permutation

KEYS = st.integers(0, 2**64 - 1)
IDS = st.lists(st.integers(0, 2**40), max_size=30)


def ids(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_keys_are_what_they_were() -> None:
    assert key64() == 13020603013274838756
    assert key64("validation", 0) == 9061410155417461602
    assert key64("row groups", 0, 1) == 5910924825573659972


def test_keys_tell_parts_types_and_order_apart() -> None:
    parts = [("a", "b"), ("b", "a"), ("ab",), ("a", "b", ""), (1, 2), (12,), ("1", "2"), (1, "2"), (-1,), (1,)]
    assert len({key64(*each) for each in parts}) == len(parts)


@given(st.lists(st.integers() | st.text(max_size=5), max_size=4))
def test_keys_have_64_bits(parts: list[int | str]) -> None:
    assert 0 <= key64(*parts) < 2**64


def test_permutations_are_what_they_were() -> None:
    assert permutation(10, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert permutation(12, 2**64 - 1).tolist() == [8, 9, 10, 11, 0, 7, 4, 2, 6, 3, 1, 5]
    long = permutation(100_000, 42).astype("<i8").tobytes()
    assert sha256(long).hexdigest() == "38af5f3d95ca26a30cc1968117c66af96ae7d4a40d6051e27891e83db351b294"


@given(st.integers(0, 200), KEYS)
def test_permutation_holds_each_number_once(size: int, key: int) -> None:
    drawn = permutation(size, key)
    assert drawn.dtype == np.int64
    assert sorted(drawn.tolist()) == list(range(size))


@given(KEYS, KEYS)
def test_permutation_depends_on_the_key(one: int, other: int) -> None:
    assert np.array_equal(permutation(50, one), permutation(50, other)) == (one == other)


def test_digests_are_what_they_were() -> None:
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
def test_digest_tells_a_missing_a_repeated_and_another_sample(values: list[int], new: int, data: st.DataObject) -> None:
    digest = multiset_digest(ids(values))
    place = data.draw(st.integers(0, len(values) - 1))
    assert multiset_digest(ids(values[:place] + values[place + 1 :])) != digest
    assert multiset_digest(ids([*values, values[place]])) != digest
    changed = [*values[:place], new, *values[place + 1 :]]
    assert (multiset_digest(ids(changed)) == digest) == (new == values[place])


@pytest.mark.parametrize("pair", [(0, 0), (3, 3)])
def test_pairs_do_not_cancel(pair: tuple[int, int]) -> None:
    assert multiset_digest(ids(list(pair))) != 0
