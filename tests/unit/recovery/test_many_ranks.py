"""Tests that what each rank decides by itself in a restore takes no more than its share, on many ranks."""

import cProfile
import json
import pstats
from collections.abc import Callable
from functools import partial

import many_ranks

from undula.state.checkpoint_files import wanted_chunks

PARAMETERS = 100


def calls(world_size: int) -> int:
    """Return the number of calls of functions with which one rank decides what it needs after another one was replaced."""
    sent, whole = many_ranks.descriptions(world_size, PARAMETERS), many_ranks.holding(0, world_size, PARAMETERS)

    def decide() -> None:
        needed, _ = many_ranks.needs(world_size // 2, world_size - 1, sent, whole)
        many_ranks.moves(world_size // 2, needed, whole)

    return counted(decide)


def counted(function: Callable[[], object]) -> int:
    """Return the number of calls of functions that a call makes."""
    profile = cProfile.Profile()
    with profile:
        function()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_the_work_of_a_rank_grows_no_faster_than_the_number_of_ranks() -> None:
    calls(4)  # imports
    assert calls(64) < 2.2 * calls(32)


def test_a_checkpoint_does_not_describe_each_piece_of_each_tensor() -> None:
    commit = many_ranks.committed(64, PARAMETERS)
    pieces = many_ranks.wanted_pieces(5, 63, PARAMETERS)
    wanted = wanted_chunks(commit, pieces)
    assert {name for chunks in wanted.values() for name, *_ in chunks} == {*pieces}
    assert len(json.dumps(commit.chunks)) < 64 * 80 * (len(many_ranks.SHAPES) + 1)
    # Finding what a rank reads looks at each kind of tensors once.
    few, many = many_ranks.committed(8, PARAMETERS), many_ranks.wanted_pieces(5, 7, PARAMETERS)
    assert counted(partial(wanted_chunks, commit, pieces)) < 2 * counted(partial(wanted_chunks, few, many))


def test_descriptions_are_small_and_do_not_grow_with_the_number_of_tensors() -> None:
    few, many = (max(map(len, many_ranks.descriptions(8, count))) for count in (10, 500))
    names = sum(len(name) for name in many_ranks.holding(0, 8, 500).expected)
    assert many - names < few + 12 * 2000


def test_a_rank_needs_the_same_part_of_all_tensors_of_a_kind_at_once() -> None:
    sent, whole = many_ranks.descriptions(8, PARAMETERS), many_ranks.holding(0, 8, PARAMETERS)
    needed, asked = many_ranks.needs(3, 7, sent, whole)
    assert len(asked.answers[0][0].holding.boxes) == len(many_ranks.SHAPES) + 1  # type: ignore[union-attr]
    assert len(needed) <= 3 * len(many_ranks.SHAPES)
    parts = [part for need in needed for part in need.parts(sorted(whole.expected))]
    assert len({name for _, (name, _) in parts}) == 3 * PARAMETERS
