"""The rows of a window, and batches of them as torch tensors, copied at most once."""

import itertools
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

Batch = dict[str, Tensor | list[str] | list[bytes]]
"""Columns by name: tensors of shape [samples, *sample shape]; strings and bytes as lists."""


@dataclass(frozen=True)
class Samples:
    """Consecutive samples of one virtual worker."""

    ids: NDArray[np.int64]
    batch: Batch


class WindowRows:
    """The rows of a window, to be taken in stream order.

    Args:
        read: the window.
        parts: its rows in stored order, as they came.
    """

    def __init__(self, read: WindowRead, parts: list[pa.Table]):
        table = pa.concat_tables(parts)
        self.start = read.window.start
        self.num_rows = table.num_rows
        self._ids = table[ID_COLUMN].to_numpy()
        if not np.array_equal(self._ids, read.ids()):
            raise ManifestError(
                f"{read.pieces[0].shard.url} gave other rows than its plan says: index it again with `undula data index`"
            )
        self._order = torch.from_numpy(read.window.permutation()) if read.window.key is not None else None
        columns = mapped_columns(table) if read.map else read.columns
        self._columns = {column.name: _column(table[column.name], column) for column in columns}

    def take(self, start: int, stop: int) -> Samples:
        """The rows that stand at places [start, stop) of the window's order.

        Without a shuffle within windows the tensors lie in the memory that was read; otherwise they are new.
        """
        if self._order is None:
            rows = slice(start, stop)
            batch = {name: values[rows] for name, values in self._columns.items()}
            return Samples(self._ids[rows], {name: _as_batch(values) for name, values in batch.items()})
        places = self._order[start:stop]
        taken = {
            name: values.index_select(0, places)
            if isinstance(values, Tensor)
            else values.take(pa.array(places.numpy()))
            for name, values in self._columns.items()
        }
        return Samples(self._ids[places.numpy()], {name: _as_batch(values) for name, values in taken.items()})


def concatenated(parts: list[Samples]) -> Samples:
    """Samples one after another."""
    if len(parts) == 1:
        return parts[0]
    batch: Batch = {}
    for name, first in parts[0].batch.items():
        values: list[Any] = [part.batch[name] for part in parts]
        batch[name] = torch.cat(values) if isinstance(first, Tensor) else list(itertools.chain(*values))
    return Samples(np.concatenate([part.ids for part in parts]), batch)


def _as_batch(values: Tensor | pa.Array) -> Tensor | list[str] | list[bytes]:
    return values if isinstance(values, Tensor) else list(values.to_pylist())


def _column(chunks: pa.ChunkedArray, column: Column) -> Tensor | pa.Array:
    """A column's values: a tensor of shape [rows, *sample shape], or strings and bytes as they are."""
    if column.type in TEXT_TYPES:
        return _without_nulls(chunks.combine_chunks(), column)
    tensors = [_tensor(chunk, column) for chunk in chunks.chunks]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _tensor(array: pa.Array, column: Column) -> Tensor:
    array = _without_nulls(array, column)
    if column.shape:
        array = _without_nulls(array.flatten(), column)
    is_bits = pa.types.is_boolean(array.type)
    values = (
        torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
        if is_bits
        else from_dlpack(array.__dlpack__(max_version=(1, 0)))
    )
    return values.view(-1, *column.shape)


def _without_nulls(array: pa.Array, column: Column) -> pa.Array:
    if array.null_count:
        raise ManifestError(
            f"column {column.name!r} has nulls, which no tensor holds: fill them, or leave it out of data.columns"
        )
    return array
