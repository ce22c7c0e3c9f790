"""Rows of a window, and batches of them as torch tensors. Batches are gathered from the chunks in which the rows were read.

torch allocates every tensor of a batch, at a multiple of 64 bytes. Arrow and NumPy align their memory differently, and a slice of it can
begin anywhere. torch's choice of a kernel, and with it the last bits of a result, could then depend on the rank and on the window.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from undula.data.manifest import ID_COLUMN, TEXT_TYPES, Column
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
            name: _taken(values.numpy(), places) if isinstance(values, Tensor) else [values[place] for place in places]
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
        columns = read.map.result if read.map else read.columns
        self._columns = {column.name: _Values(table[column.name], column) for column in columns}

    def take(self, start: int, stop: int) -> Samples:
        """Return a copy of the rows at places [start, stop) of the window's stream order."""
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
            column.values(chunk) if column.type in TEXT_TYPES else _numbers(chunk, column) for chunk in chunks
        ]

    def slice(self, start: int, stop: int) -> Tensor | list[Any]:
        """Return the rows [start, stop)."""
        parts = [
            _as_values(chunk[max(start - int(begin), 0) : stop - int(begin)])
            for chunk, begin, end in zip(self._chunks, self._starts, self._starts[1:], strict=False)
            if begin < stop and start < end
        ]
        return _joined(parts or [_as_values(self._chunks[0][:0])])

    def take(self, places: Ids) -> Tensor | list[Any]:
        """Return the rows at the given places. NumPy gathers them in one thread; torch's thread pool would compete with training."""
        if len(self._chunks) == 1 and isinstance(self._chunks[0], np.ndarray):
            return _taken(self._chunks[0], places)
        owners = np.searchsorted(self._starts, places, side="right") - 1
        by_chunk = [np.flatnonzero(owners == number) for number in range(len(self._chunks))]
        parts = [
            chunk.take(places[own] - start, axis=0)
            if isinstance(chunk, np.ndarray)
            else _as_values(chunk.take(pa.array(places[own] - start)))
            for chunk, own, start in zip(self._chunks, by_chunk, self._starts, strict=False)
        ]
        return _scattered(parts, by_chunk)


def _as_values(rows: NDArray[Any] | pa.Array) -> NDArray[Any] | list[Any]:
    return rows if isinstance(rows, np.ndarray) else list(rows.to_pylist())


def _taken(rows: NDArray[Any], places: Ids) -> Tensor:
    tensor = _empty_like(rows, len(places))
    rows.take(
        places, axis=0, out=tensor.numpy(), mode="clip"
    )  # with the default mode, NumPy would copy the rows once more
    return tensor


def _scattered(parts: Sequence[NDArray[Any] | list[Any]], places: list[Ids]) -> Tensor | list[Any]:
    """Return all rows in one sequence, with row i of part p at index `places[p][i]`."""
    first, size = parts[0], sum(map(len, places))
    if isinstance(first, np.ndarray):
        tensor = _empty_like(first, size)
        values = tensor.numpy()
        for part, own in zip(parts, places, strict=True):
            values[own] = part
        return tensor
    if len(parts) == 1:
        return first
    items: list[Any] = [None] * size
    for part, own in zip(parts, places, strict=True):
        for place, value in zip(own, part, strict=True):
            items[place] = value
    return items


def _joined(parts: Sequence[NDArray[Any] | Tensor | list[Any]]) -> Tensor | list[Any]:
    first = parts[0]
    if isinstance(first, np.ndarray | Tensor):
        tensor = _empty_like(np.asarray(first), sum(map(len, parts)))
        np.concatenate(parts, out=tensor.numpy())
        return tensor
    return first if len(parts) == 1 else list(itertools.chain(*parts))


def _empty_like(rows: NDArray[Any], count: int) -> Tensor:
    """Return a tensor for `count` rows of this kind, in memory of torch."""
    return torch.empty((count, *rows.shape[1:]), dtype=torch.from_numpy(np.empty(0, rows.dtype)).dtype)


def _numbers(array: pa.Array, column: Column) -> NDArray[Any]:
    """Return the rows of a chunk as numbers. They are not copied, except for booleans, which Arrow stores as bits."""
    values: NDArray[Any] = column.values(array).to_numpy(zero_copy_only=False)
    return values.reshape(-1, *column.shape)
