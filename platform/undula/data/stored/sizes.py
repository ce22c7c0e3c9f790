"""Estimates of decoded sizes: the memory that rows of a data set take after they have been read.

Encoded sizes can be much smaller, because Parquet stores repeated values once: masks of 100 MB can take 0.2 MB in a file.
"""

from functools import cached_property, lru_cache
from math import prod

import numpy as np
import pyarrow as pa

from undula.data.stored.cache import DiskCache
from undula.data.stored.manifest import TEXT_TYPES, Column, Manifest
from undula.data.stored.shards import Shard


def fixed_bytes(columns: tuple[Column, ...], num_rows: int) -> int:
    """Return the size in bytes of decoded rows, without the columns of text."""
    return -(-num_rows * _row_bits(columns) // 8)


@lru_cache(maxsize=64)
def _row_bits(columns: tuple[Column, ...]) -> int:
    """Return the size in bits of a row, without its text. Arrow stores booleans as bits."""
    numbers = [column for column in columns if column.type not in TEXT_TYPES]
    return sum(prod(column.shape) * int(pa.type_for_alias(column.type).bit_width) for column in numbers)


class RowSizes:
    """Estimated sizes of the decoded rows of some columns of a data set.

    The sizes of numbers follow from their types. A row group is read once per process to measure text, because pyarrow does not return
    Parquet's size statistics. An estimate of whole rows is at least their encoded size, which is also in memory while they are decoded.

    Args:
        manifest: The data set.
        columns: Columns to read.
        cache: Disk cache for data from S3.
    """

    def __init__(self, manifest: Manifest, columns: tuple[Column, ...], cache: DiskCache | None = None):
        self._manifest = manifest
        self._columns = columns
        self._cache = cache
        self._is_whole = set(columns) == set(manifest.columns)

    def decoded(self, row_group: int, num_rows: int) -> int:
        """Return the estimated size in bytes of some decoded rows of a row group of the data set."""
        size = fixed_bytes(self._columns, num_rows) + round(self._text_row_bytes * num_rows)
        if not self._is_whole:
            return size
        number, group = self._manifest.row_group_places[row_group]
        file = self._manifest.files[number]
        return max(size, file.row_group_bytes[group] * num_rows // max(file.row_groups[group], 1))

    @cached_property
    def _text_row_bytes(self) -> float:
        """Mean size in bytes of a row's text in the first row group that has rows."""
        names = tuple(column.name for column in self._columns if column.type in TEXT_TYPES)
        if not names or not self._manifest.num_rows:
            return 0.0
        number, group = self._manifest.row_group_places[int(np.flatnonzero(self._manifest.row_counts)[0])]
        return _measured(Shard.of(self._manifest, number, self._cache), group, names)


@lru_cache(maxsize=64)
def _measured(shard: Shard, row_group: int, names: tuple[str, ...]) -> float:
    """Return the mean size in bytes of a row. It is kept, because each resume in this process needs it again."""
    table = shard.row_group(row_group, names)
    return float(table.nbytes / table.num_rows)
