"""Extents of what processes hold of a state, in a form that is small also for models of thousands of tensors on hundreds of ranks.

Most tensors of a model are sharded as others are. Tensors of one dtype and shape of which each process holds the same box are of one
*kind*, and what is decided for one of them holds for all. So a process sends its names once, and otherwise a box for each kind.
"""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from undula.state.boxes import Box
from undula.state.pieces import Holding, TensorSpec, is_complete

Names: TypeAlias = Mapping[bytes, tuple[str, ...]]
"""Names of the tensors of states in their order, by digest."""


@dataclass(frozen=True)
class Extent:
    """Extent of a process's pieces without the names of the tensors."""

    names: bytes
    """Digest of the names in their order."""
    boxes: tuple[tuple[TensorSpec, Box | None], ...]
    """Dtype, shape and box of the tensors of each kind; None for tensors of which the process has nothing."""
    packed: bytes
    """Number of the kind of each tensor, in the order of the names: integers of 32 bits, compressed."""

    @classmethod
    def of(cls, holding: Holding) -> "tuple[Extent, tuple[str, ...]]":
        """Return the extent of a holding, and the names of its tensors."""
        names = tuple(sorted(holding.expected))
        specs = (holding.expected[name] for name in names)
        keys = [
            (TensorSpec(spec.dtype, spec.shape), holding.boxes.get(name))
            for name, spec in zip(names, specs, strict=True)
        ]
        kinds = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        numbers = np.asarray([kinds[key] for key in keys], np.uint32)
        digest = blake2b("\n".join(names).encode(), digest_size=16).digest()
        return cls(digest, tuple(kinds), zlib.compress(numbers.tobytes())), names


class Kinds:
    """Kinds of tensors that several extents have together: within one, all of them give the same boxes.

    Args:
        extents: The extents.
        names: Names of their tensors.
    """

    def __init__(self, extents: Iterable[Extent], names: Names):
        distinct = dict.fromkeys((extent.names, extent.packed) for extent in extents)
        self._known = sorted({name for digest, _ in distinct for name in names[digest]})
        place = {name: number for number, name in enumerate(self._known)}
        self._numbers: dict[tuple[bytes, bytes], npt.NDArray[np.int64]] = {}
        self._labels = np.zeros(len(self._known), np.int64)
        for digest, packed in distinct:
            numbers = np.zeros(len(self._known), np.int64)  # 0 for a tensor that the extents do not know
            numbers[[place[name] for name in names[digest]]] = np.frombuffer(zlib.decompress(packed), np.uint32) + 1
            self._numbers[digest, packed] = numbers
            _, self._labels = np.unique(self._labels * (numbers.max(initial=0) + 1) + numbers, return_inverse=True)
        _, self._firsts = np.unique(self._labels, return_index=True)

    @cached_property
    def first_of(self) -> dict[str, str]:
        """Name of the first tensor of the same kind, by name."""
        return {name: self._known[self._firsts[label]] for name, label in zip(self._known, self._labels, strict=True)}

    def holding(self, extent: Extent) -> Holding:
        """Return an extent as that of the first tensor of each kind."""
        expected, boxes = {}, {}
        for first, number in zip(self._firsts, self._numbers[extent.names, extent.packed][self._firsts], strict=True):
            if number:
                spec, box = extent.boxes[number - 1]
                expected[self._known[first]] = spec
                if box is not None:
                    boxes[self._known[first]] = box
        return Holding(expected, boxes)

    @cached_property
    def members(self) -> dict[str, list[str]]:
        """Names of the tensors of each kind, by the name of the first one."""
        members: dict[str, list[str]] = {}
        for name, first in self.first_of.items():
            members.setdefault(first, []).append(name)
        return members


def are_complete(extents: Iterable[tuple[Extent, tuple[str, ...]] | None]) -> bool:
    """Return whether processes together hold a whole state.

    Args:
        extents: Extent of each process and the names of its tensors; None for a process that holds the whole state.
    """
    known = list(extents)
    if None in known:
        return True
    pairs = [each for each in known if each is not None]
    kinds = Kinds((extent for extent, _ in pairs), {extent.names: names for extent, names in pairs})
    return is_complete(kinds.holding(extent) for extent, _ in pairs)
