"""Rows of a window, and batches of them as torch tensors. A batch has copies of rows of one or more windows.

torch allocates every tensor of a batch, at a multiple of 64 bytes. Arrow and NumPy align their memory differently, and a slice of it can
begin anywhere. torch's choice of a kernel, and with it the last bits of a result, could then depend on the rank and on the window.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from undula.data.reader import Samples
from undula.data.stored.manifest import ID_COLUMN, TEXT_TYPES, Column
from undula.data.stored.reads import WindowRead
from undula.errors import ManifestError
from undula.plan.keys import Ids

Batch = dict[str, Tensor | list[str] | list[bytes]]
"""Values by column name: tensors of shape [samples, *sample shape], and lists of str or bytes."""


class WindowRows:
    """Rows of a window, which can be taken in stream order.

    Args:
        read: Read of the window.
        parts: Tables that together have the window's rows in stored order.
    """

    def __init__(self, read: WindowRead, parts: list[pa.Table]):
        table = pa.concat_tables(parts)
        self.virtual_worker = read.window.virtual_worker
        self.epoch = read.epoch
        self.start = read.window.start
        self.num_rows = table.num_rows
        self._ids = table[ID_COLUMN].to_numpy()
        if not np.array_equal(self._ids, read.ids()):
            raise ManifestError(
                f"the rows of {read.ranges[0].shard.store.url} differ from its manifest; run `undula data index` on it again"
            )
        self._order = read.window.permutation() if read.window.key is not None else None
        columns = read.map.result if read.map else read.columns
        self._columns = {column.name: _values(table[column.name], column) for column in columns}

    def take(self, start: int, stop: int) -> Samples:
        """Return a copy of the rows at places [start, stop) of the window's stream order."""
        if self._order is None:
            return Samples(self._ids[start:stop], {name: of.slice(start, stop) for name, of in self._columns.items()})
        places = self._order[start:stop]
        return Samples(self._ids[places], {name: of.take(places) for name, of in self._columns.items()})


def samples_at(samples: Samples, places: Ids) -> Samples:
    """Return the samples at the given places."""
    batch = {
        name: _taken(values.numpy(), places) if isinstance(values, Tensor) else [values[place] for place in places]
        for name, values in samples.batch.items()
    }
    return Samples(samples.ids[places], batch)


def concatenated(parts: list[Samples]) -> Samples:
    """Concatenate samples."""
    if len(parts) == 1:
        return parts[0]
    batch = {name: _joined([part.batch[name] for part in parts]) for name in parts[0].batch}
    return Samples(np.concatenate([part.ids for part in parts]), batch)


class _Numbers:
    """Column of numbers of a window, in one array: gathering each batch from several chunks takes longer than joining them once."""

    def __init__(self, chunks: list[pa.Array], column: Column):
        rows = [column.numbers(chunk) for chunk in chunks]
        self._rows = rows[0] if len(rows) == 1 else np.concatenate(rows)

    def slice(self, start: int, stop: int) -> Tensor:
        """Return a copy of the rows [start, stop)."""
        rows = self._rows[start:stop]
        tensor = _empty_like(rows, len(rows))
        np.copyto(tensor.numpy(), rows)
        return tensor

    def take(self, places: Ids) -> Tensor:
        """Return the rows at the given places. NumPy gathers them in one thread; torch's thread pool would compete with training."""
        return _taken(self._rows, places)


class _Texts:
    """Column of text of a window, in one array."""

    def __init__(self, chunks: list[pa.Array], column: Column):
        large = pa.large_string() if column.type.endswith("string") else pa.large_binary()
        rows = [column.values(chunk).cast(large) for chunk in chunks]  # other arrays cannot hold 2 GiB
        self._rows = rows[0] if len(rows) == 1 else pa.concat_arrays(rows)

    def slice(self, start: int, stop: int) -> list[Any]:
        """Return the rows [start, stop)."""
        return list(self._rows[start:stop].to_pylist())

    def take(self, places: Ids) -> list[Any]:
        """Return the rows at the given places."""
        return list(self._rows.take(pa.array(places)).to_pylist())


def _values(values: pa.ChunkedArray, column: Column) -> _Numbers | _Texts:
    chunks = [chunk for chunk in values.chunks if len(chunk)]
    return _Texts(chunks, column) if column.type in TEXT_TYPES else _Numbers(chunks, column)


def _taken(rows: NDArray[Any], places: Ids) -> Tensor:
    tensor = _empty_like(rows, len(places))
    rows.take(
        places, axis=0, out=tensor.numpy(), mode="clip"
    )  # with the default mode, NumPy would copy the rows once more
    return tensor


def _joined(parts: Sequence[Tensor | list[Any]]) -> Tensor | list[Any]:
    first = parts[0]
    if isinstance(first, Tensor):
        tensor = _empty_like(first.numpy(), sum(map(len, parts)))
        np.concatenate(parts, out=tensor.numpy())
        return tensor
    return list(itertools.chain(*parts))


def _empty_like(rows: NDArray[Any], count: int) -> Tensor:
    """Return a tensor for `count` rows of this kind, in memory of torch."""
    dtype = torch.from_numpy(np.empty(0, rows.dtype)).dtype
    return torch.empty((count, *rows.shape[1:]), dtype=dtype, device="cpu")
