"""A sharded state of many tensors on many ranks, of which one is replaced, and what a rank decides by itself when they restore it."""

import json
import pickle
from collections.abc import Sequence

import torch

from undula.recovery.baseline import IN_WORK
from undula.recovery.moves import Move, Need, moves_to
from undula.recovery.offers import Answer, Asked, Content, Described, chosen, combined, described, newest_complete
from undula.recovery.restore import needs_of
from undula.state.boxes import Box
from undula.state.checkpoint_files import WrittenFile, entries_of
from undula.state.commit import Commit
from undula.state.extents import Extent
from undula.state.pieces import Holding, Piece, TensorSpec, dtype_named

SHAPES = ((4096, 1024), (1024, 4096), (1024,), (50_257, 1024), (3072, 1024))
"""Shapes of weights, as in a decoder."""


def holding(rank: int, world_size: int, num_parameters: int) -> Holding:
    """Return the extent of a rank's part of a model's parameters and of what Adam keeps for them: four tensors for each parameter."""
    expected, boxes = {}, {}
    for number in range(num_parameters):
        shape = SHAPES[number % len(SHAPES)]
        rows = -(-shape[0] // world_size)
        begin = min(rank * rows, shape[0])
        box: Box = (begin, *[0] * (len(shape) - 1)), (min(rows, shape[0] - begin), *shape[1:])
        name = f"layers.{number}.weight"
        for each in (f"model.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"):
            expected[each], boxes[each] = TensorSpec("float32", shape), box
        step = f"optimizer.state.{name}.step"
        expected[step], boxes[step] = TensorSpec("float32", (), ()), ((), ())
    return Holding(expected, boxes)


def descriptions(world_size: int, num_parameters: int) -> list[bytes]:
    """Return what each rank sends to the others."""
    return [pickle.dumps(described(answers(holding(rank, world_size, num_parameters)))) for rank in range(world_size)]


def answers(own: Holding) -> list[Answer]:
    """Return the answers of a rank that holds the state of the last step, and has a snapshot of the one before."""
    boxes = {name: box for name, box in own.boxes.items() if box[1]}
    shards = Holding(own.expected, boxes)
    return [
        Answer(age, held, origin, last=IN_WORK, content=content)
        for age, origin in (((1, 8), "a worker"), ((1, 7), "a node"))
        for held, content in ((own, Content.STATE), (shards, Content.SHARDS))
    ]


def committed(world_size: int, num_parameters: int) -> Commit:
    """Return the description of a checkpoint of all ranks, as rank 0 makes it and others read it."""
    files, names = [], {}
    for rank in range(world_size):
        own = holding(rank, world_size, num_parameters)
        # Rank 0 writes what all ranks hold alike.
        boxes = {name: box for name, box in own.boxes.items() if not rank or box[1]}
        extent, names[extent.names] = Extent.of(Holding(own.expected, boxes))
        files.append(WrittenFile(f"rank-{rank:05d}.safetensors", 1, "", extent))
    entries = entries_of(own.expected, {}, names, files)
    body = {"tensors": entries["tensors"], "chunks": entries["chunks"], "values": {}, "files": {}}
    return Commit("checkpoints/step-00000001-a1", 1, "", **json.loads(json.dumps(body)))


def wanted_pieces(rank: int, world_size: int, num_parameters: int) -> dict[str, Piece]:
    """Return the pieces that a rank restores."""
    own = holding(rank, world_size, num_parameters)
    return {
        name: Piece(torch.empty(box[1], device="meta"), own.expected[name].shape, box[0], False)
        for name, box in own.boxes.items()
    }


def needs(rank: int, world_size: int, sent: Sequence[bytes], expected: Holding) -> tuple[list[Need], Asked]:
    """Return what one of `world_size` ranks needs of the others, given what all have sent, and a holding with all tensors."""
    found: list[Described] = [pickle.loads(each) for each in sent]
    asked = combined([pairs for pairs, _ in found], found[0][1])
    age = newest_complete(asked.answers)
    numbers = chosen(asked.answers, age)
    used = [[of[number] for number in own] for of, own in zip(asked.answers, numbers, strict=True)]
    pieces = wanted_pieces(rank, world_size, len(expected.expected) // 4)
    return needs_of(rank, pieces, Asked(used, asked.kinds), expected.expected), asked


def moves(rank: int, needed: Sequence[Need], expected: Holding) -> list[Move]:
    """Return the moves to a rank."""
    known = sorted(expected.expected)
    dtypes = {name: dtype_named(spec.dtype) for name, spec in expected.expected.items()}
    return moves_to(rank, [part for need in needed for part in need.parts(known)], dtypes)
