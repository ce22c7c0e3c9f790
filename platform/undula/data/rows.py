"""Rows of a window, and batches of them as torch tensors. Batches are gathered from the chunks in which the rows were read."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from undula.data.manifest import ID_COLUMN, TEXT_TYPES, Column
from undula.data.maps import mapped_columns
from undula.data.read import WindowRead
from undula.errors import ManifestError
from undula.plan.keys import Ids

Batch = dict[str, Tensor | list[str] | list[bytes]]
"""Values by column name: tensors of shape [samples, *sample shape], and lists of str or bytes."""


@dataclass(frozen=True)
class Samples:
    """Ordered samples and their ids."""

    ids: NDArray[np.int64]
    """Ids of the samples; shape [samples]."""
    batch: Batch

    def at(self, places: Ids) -> "Samples":
        """Return the samples at the given places."""
        batch = {
            name: torch.from_numpy(values.numpy()[places])
            if isinstance(values, Tensor)
            else [values[place] for place in places]
            for name, values in self.batch.items()
        }
        return Samples(self.ids[places], batch)


class WindowRows:
    """Rows of a window, which can be taken in stream order.

    Args:
        read: Read of the window.
        parts: Tables that together have the window's rows in stored order.
    """

    def __init__(self, read: WindowRead, parts: list[pa.Table]):
        table = pa.concat_tables(parts)
        self.start = read.window.start
        self.num_rows = table.num_rows
        self._ids = table[ID_COLUMN].to_numpy()
        if not np.array_equal(self._ids, read.ids()):
            raise ManifestError(
                f"the rows of {read.ranges[0].shard.store.url} differ from its manifest; run `undula data index` on it again"
            )
        self._order = read.window.permutation() if read.window.key is not None else None
        columns = mapped_columns(table) if read.map else read.columns
        self._columns = {column.name: _Values(table[column.name], column) for column in columns}

    def take(self, start: int, stop: int) -> Samples:
        """Return the rows at places [start, stop) of the window's stream order.

        The tensors are views of the memory that was read if the rows are not shuffled within windows and lie in one chunk. Otherwise they
        are copies.
        """
        if self._order is None:
            return Samples(self._ids[start:stop], {name: of.slice(start, stop) for name, of in self._columns.items()})
        places = self._order[start:stop]
        return Samples(self._ids[places], {name: of.take(places) for name, of in self._columns.items()})


def concatenated(parts: list[Samples]) -> Samples:
    """Concatenate samples."""
    if len(parts) == 1:
        return parts[0]
    batch = {name: _joined([part.batch[name] for part in parts]) for name in parts[0].batch}
    return Samples(np.concatenate([part.ids for part in parts]), batch)


class _Values:
    """Column of a window, in the chunks in which it was read. Joining the chunks would copy every row once more."""

    def __init__(self, values: pa.ChunkedArray, column: Column):
        chunks = [chunk for chunk in values.chunks if len(chunk)]
        self._starts = np.cumsum([0, *map(len, chunks)])
        self._chunks = [
            column.values(chunk) if column.type in TEXT_TYPES else _tensor(chunk, column) for chunk in chunks
        ]

    def slice(self, start: int, stop: int) -> Tensor | list[Any]:
        """Return the rows [start, stop)."""
        parts = [
            _as_batch(chunk[max(start - int(begin), 0) : stop - int(begin)])
            for chunk, begin, end in zip(self._chunks, self._starts, self._starts[1:], strict=False)
            if begin < stop and start < end
        ]
        return _joined(parts) if parts else _as_batch(self._chunks[0][:0])

    def take(self, places: Ids) -> Tensor | list[Any]:
        """Return the rows at the given places. NumPy gathers them in one thread; torch's thread pool would compete with training."""
        owners = np.searchsorted(self._starts, places, side="right") - 1
        by_chunk = [np.flatnonzero(owners == number) for number in range(len(self._chunks))]
        parts = [
            _taken(chunk, places[own] - start)
            for chunk, own, start in zip(self._chunks, by_chunk, self._starts, strict=False)
        ]
        return _scattered(parts, by_chunk)


def _taken(chunk: Tensor | pa.Array, places: Ids) -> Tensor | list[Any]:
    if isinstance(chunk, Tensor):
        return torch.from_numpy(chunk.numpy().take(places, axis=0))
    return list(chunk.take(pa.array(places)).to_pylist())


def _scattered(parts: Sequence[Tensor | list[Any]], places: list[Ids]) -> Tensor | list[Any]:
    """Return all rows in one sequence, with row i of part p at index `places[p][i]`."""
    first, size = parts[0], sum(map(len, places))
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        values = np.empty((size, *first.shape[1:]), dtype=first.numpy().dtype)
        for part, own in zip(parts, places, strict=True):
            values[own] = part
        return torch.from_numpy(values)
    items: list[Any] = [None] * size
    for part, own in zip(parts, places, strict=True):
        for place, value in zip(own, part, strict=True):
            items[place] = value
    return items


def _joined(parts: Sequence[Tensor | list[Any]]) -> Tensor | list[Any]:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.from_numpy(np.concatenate(parts))
    return list(itertools.chain(*parts))


def _as_batch(values: Tensor | pa.Array) -> Tensor | list[Any]:
    return values if isinstance(values, Tensor) else list(values.to_pylist())


def _tensor(array: pa.Array, column: Column) -> Tensor:
    array = column.values(array)
    is_bits = pa.types.is_boolean(array.type)
    values = (
        torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
        if is_bits
        else from_dlpack(array.__dlpack__(max_version=(1, 0)))
    )
    return values.view(-1, *column.shape)
