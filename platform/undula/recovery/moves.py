"""Moves of parts of a state to the ranks that lack them, from point to point, each part once.

A *source* is a process that holds parts of the state. The ranks of the group are the first sources, in the order of their numbers; the
workers that leave follow them.
"""

import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from undula.recovery.snapshot import aligned_bytes
from undula.state.boxes import Box, difference, elements, intersection, split
from undula.state.pieces import Piece, RankState, copy_overlap, part_of

CHUNK_BYTES = 8 * 2**20
"""Maximum size in bytes of what is sent at once, apart from a single element."""
UNDER_WAY = 3
"""Maximum number of chunks that a rank sends or receives at a time."""
Dtypes: TypeAlias = Mapping[str, torch.dtype]
"""Dtypes of the tensors of a state as its sources have them, by name."""
Part: TypeAlias = tuple[str, Box]
"""Name of a tensor, and a box of it."""


@dataclass(frozen=True)
class Move:
    """Parts that a source gives to a rank at once."""

    number: int
    """Number of this move among those from the source to the rank."""
    source: int
    rank: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Need:
    """Box that a rank needs of several tensors, and the source that gives it. All ranks learn of it."""

    source: int
    box: Box
    names: bytes
    """The tensors, as `mask_of` packs their names."""

    def parts(self, known: Sequence[str]) -> list[tuple[int, Part]]:
        """Return the source and the part for each tensor, given the names of all tensors."""
        mask = np.unpackbits(np.frombuffer(zlib.decompress(self.names), np.uint8))
        return [(self.source, (name, self.box)) for name, is_needed in zip(known, mask, strict=False) if is_needed]


def mask_of(names: Collection[str], known: Sequence[str]) -> bytes:
    """Return a compressed bit for each known name, which says whether it is one of some names."""
    return zlib.compress(np.packbits([name in names for name in known]).tobytes())


def lacking(rank: int, wanted: Box, sources: Sequence[Sequence[Box]]) -> list[tuple[int, Box]]:
    """Return which parts of a tensor a rank needs of which other source, so that it gets each element that it lacks once.

    Args:
        rank: Number of the rank, which is also that of its own source.
        wanted: Box that the rank needs.
        sources: Boxes that each source holds, and together all that is wanted.
    """
    # Ranks begin with different sources, so that not all of them ask the same one for what every source holds.
    others = [*range(rank + 1, len(sources)), *range(rank)]
    missing = [wanted] if elements(wanted) else []
    needed = []
    for source in (rank, *others):
        for held in sources[source] if missing else ():
            common = [part for each in missing if (part := intersection(each, held))]
            missing = [part for each in missing for part in difference(each, held)]
            needed += [(source, part) for part in common if source != rank]
    return needed


def moves_to(rank: int, needed: Iterable[tuple[int, Part]], dtypes: Dtypes) -> list[Move]:
    """Group what a rank needs into moves of at most CHUNK_BYTES each.

    Args:
        rank: Number of the rank.
        needed: Sources and the parts that it needs of each.
        dtypes: Dtypes of the tensors.
    """
    chunks: dict[int, list[list[Part]]] = {}
    filled: dict[int, int] = {}
    for source, (name, box) in needed:
        size = dtypes[name].itemsize
        for part in split(box, CHUNK_BYTES // size):
            num_bytes = elements(part) * size
            if source not in chunks or filled[source] + num_bytes > CHUNK_BYTES:
                chunks.setdefault(source, []).append([])
                filled[source] = 0
            chunks[source][-1].append((name, part))
            filled[source] += num_bytes
    return [
        Move(number, source, rank, tuple(parts))
        for source, of_source in chunks.items()
        for number, parts in enumerate(of_source)
    ]


def in_common_order(moves: Iterable[Move]) -> list[Move]:
    """Return moves in an order in which no two ranks can wait for each other, if all ranks take those of theirs in this order."""
    return sorted(moves, key=lambda move: (move.number, move.rank - move.source, move.source))


def packed_parts(states: Sequence[RankState], parts: Sequence[Part]) -> Tensor:
    """Return parts of what a source holds one after another, as bytes in host memory; each begins at a multiple of 64."""
    tensors = [_find(states, name, box) for name, box in parts]
    flat = torch.empty(sum(map(aligned_bytes, tensors)), dtype=torch.uint8, device="cpu")
    for tensor, place in zip(
        tensors, _places(flat, [(each.dtype, tuple(each.shape)) for each in tensors]), strict=True
    ):
        place.copy_(tensor)
    return flat


def unpack_parts(flat: Tensor, parts: Sequence[Part], targets: Mapping[str, Piece], dtypes: Dtypes) -> None:
    """Copy parts that `packed_parts` has packed into the pieces of a rank, which may have other dtypes than the source."""
    kinds = [(dtypes[name], box[1]) for name, box in parts]
    for (name, box), place in zip(parts, _places(flat, kinds), strict=True):
        copy_overlap(box, place, targets[name])


def exchange(
    rank: int,
    moves: Iterable[Move],
    states: Sequence[RankState],
    targets: Mapping[str, Piece],
    dtypes: Dtypes,
    group: dist.ProcessGroup,
    progress: Callable[[], None],
) -> None:
    """Take part in moves between the ranks of a group.

    Args:
        rank: Number of this rank.
        moves: All moves to and from this rank whose sources are ranks. The other ends must have them too.
        states: Parts of the state that this rank holds.
        targets: Pieces that this rank restores.
        dtypes: Dtypes of the tensors.
        group: Process group of the ranks, which must support CPU tensors.
        progress: Function that is called before each move.
    """
    under_way: deque[tuple[dist.Work, Tensor, Move]] = deque()

    def end_one() -> None:
        work, flat, move = under_way.popleft()
        progress()
        work.wait()
        if move.rank == rank:
            unpack_parts(flat, move.parts, targets, dtypes)

    for move in in_common_order(moves):
        if len(under_way) == UNDER_WAY:
            end_one()
        if move.source == rank:
            flat = packed_parts(states, move.parts)
            work = dist.isend(flat, group=group, group_dst=move.rank)
        else:
            kinds = [torch.empty(box[1], dtype=dtypes[name], device="meta") for name, box in move.parts]
            flat = torch.empty(sum(map(aligned_bytes, kinds)), dtype=torch.uint8, device="cpu")
            work = dist.irecv(flat, group=group, group_src=move.source)
        assert work is not None
        under_way.append((work, flat, move))
    while under_way:
        end_one()


def _find(states: Sequence[RankState], name: str, box: Box) -> Tensor:
    """Return a part of what a source holds. It lies in one of its pieces."""
    for state in states:
        if (piece := state.pieces.get(name)) and intersection(piece.box, box) == box:
            return part_of(piece.tensor, piece.box, box)
    raise LookupError(f"no state has the part {box} of {name!r}")


def _places(flat: Tensor, kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Return views of packed parts, given their dtypes and sizes."""
    places, begin = [], 0
    for dtype, sizes in kinds:
        like = torch.empty(sizes, dtype=dtype, device="meta")
        places.append(flat[begin : begin + like.nbytes].view(dtype).view(sizes))
        begin += aligned_bytes(like)
    return places
