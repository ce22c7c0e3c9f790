"""Tests that each rank gets what it lacks, once and in parts of limited size, in an order in which all ranks can go on."""

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from undula.recovery import moves
from undula.recovery.moves import (
    CHUNK_BYTES,
    Move,
    Need,
    in_common_order,
    lacking,
    mask_of,
    moves_to,
    packed_parts,
    unpack_parts,
)
from undula.state.boxes import Box, elements, intersection, without
from undula.state.pieces import Piece, RankState

ROWS = {"weight": (13, 3), "bias": (5,), "step": ()}


def shard(rank: int, ranks: int) -> dict[str, Box]:
    """Return the boxes of a rank as `fully_shard` divides tensors: along the first dimension, in parts of equal size but for the last."""
    boxes: dict[str, Box] = {}
    for name, shape in ROWS.items():
        if not shape:
            boxes[name] = (), ()
            continue
        rows = -(-shape[0] // ranks)
        begin = min(rank * rows, shape[0])
        boxes[name] = (begin, *[0] * (len(shape) - 1)), (min(rows, shape[0] - begin), *shape[1:])
    return boxes


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, list[dict[str, list[Box]]]]:
    """Draw the number of new ranks, and what each source holds: ranks of the former group in any order, of which some leave."""
    before, after = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    held = [{name: [box] for name, box in shard(rank, before).items()} for rank in range(before)]
    order = draw(st.permutations(held))
    staying, leaving = order[:after], order[after:]
    return after, [*staying, *[{}] * (after - len(staying)), *leaving]


@given(changes())
def test_each_element_that_a_rank_lacks_comes_once(change: tuple[int, list[dict[str, list[Box]]]]) -> None:
    ranks, sources = change
    for rank in range(ranks):
        for name, box in shard(rank, ranks).items():
            needed = lacking(rank, box, [held.get(name, ()) for held in sources])
            assert all(source != rank for source, _ in needed)
            for source, part in needed:
                assert any(intersection(part, box) == part for box in sources[source][name])
            parts = [part for _, part in needed]
            lacks = without(box, sources[rank].get(name, ()))
            assert sum(map(elements, parts)) == sum(map(elements, lacks))
            assert without(box, [*sources[rank].get(name, ()), *parts]) == []


@given(changes(), st.integers(1, 40))
def test_moves_are_of_limited_size_and_have_all_parts(
    change: tuple[int, list[dict[str, list[Box]]]], limit: int
) -> None:
    ranks, sources = change
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves, "CHUNK_BYTES", limit)
        for rank in range(ranks):
            needed = [
                (source, (name, part))
                for name, box in shard(rank, ranks).items()
                for source, part in lacking(rank, box, [held.get(name, ()) for held in sources])
            ]
            planned = moves_to(rank, needed, dict.fromkeys(ROWS, torch.float32))
            for move in planned:
                assert sum(4 * elements(box) for _, box in move.parts) <= max(limit, 4)
            count = sum(elements(box) for move in planned for _, box in move.parts)
            assert count == sum(elements(box) for _, (_, box) in needed)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)), max_size=20), st.integers(1, 3))
def test_no_order_of_moves_blocks_ranks_that_have_few_under_way(drawn: list[tuple[int, int, int]], window: int) -> None:
    planned = [Move(number, source, rank, ()) for number, source, rank in set(drawn) if source != rank]
    ordered = in_common_order(planned)
    left = {rank: deque(move for move in ordered if rank in (move.source, move.rank)) for rank in range(4)}
    under_way: dict[int, deque[Move]] = {rank: deque() for rank in range(4)}
    done: set[Move] = set()
    while len(done) < len(planned):
        before = len(done), sum(map(len, left.values()))
        for rank in range(4):
            while under_way[rank] and under_way[rank][0] in done:
                under_way[rank].popleft()
            while left[rank] and len(under_way[rank]) < window:
                under_way[rank].append(left[rank].popleft())
        for move in planned:
            if move in under_way[move.source] and move in under_way[move.rank]:
                done.add(move)
        assert (len(done), sum(map(len, left.values()))) != before, "all ranks wait for each other"


def test_parts_are_converted_to_the_dtype_of_the_rank_that_gets_them() -> None:
    values = torch.arange(12.0).view(4, 3).bfloat16()
    source = RankState({"weight": Piece(values, (8, 3), (4, 0), False)}, {})
    target = Piece(torch.zeros(3, 3), (8, 3), (3, 0), False)
    parts = [("weight", ((4, 0), (2, 3)))]
    unpack_parts(packed_parts([source], parts), parts, {"weight": target}, {"weight": torch.bfloat16})
    assert target.tensor.tolist() == [[0.0] * 3, [0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@given(st.sets(st.sampled_from("abcdefghijklm")))
def test_what_a_rank_needs_names_tensors_by_their_place(names: set[str]) -> None:
    need = Need(2, ((0,), (3,)), mask_of(names, "abcdefghijklm"))
    assert need.parts("abcdefghijklm") == [(2, (name, ((0,), (3,)))) for name in sorted(names)]


def test_a_chunk_is_small_beside_the_state() -> None:
    assert 2 * moves.UNDER_WAY * CHUNK_BYTES <= 64 * 2**20
