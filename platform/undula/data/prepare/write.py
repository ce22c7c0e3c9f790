"""Writer of data sets of sharded Parquet. It writes the shards before the manifest, so that a manifest always matches its files."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from math import prod
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from undula.data.stored.index import index
from undula.data.stored.listing import PARQUET
from undula.data.stored.manifest import FORMER_NAME, MANIFEST_NAME, SHAPE_KEY, Manifest
from undula.errors import ManifestError, StorageError, UndulaError
from undula.storage import Store

ROW_GROUP_BYTES = 4 * 2**20
"""Default size of a row group in memory, in bytes."""
CONTENT_KEY = "undula.sha256"
"""Key of the footer metadata that holds a hash of the rows. Without it, a row could change without any change of
the footer, and so of the digest of the data set."""

_SHARD_NAME = re.compile(r"part-\d{5,}\.parquet")


def array_field(name: str, value_type: pa.DataType, shape: tuple[int, ...]) -> pa.Field:
    """Return the field of a column that has an array of `shape` for each sample."""
    values = pa.list_(pa.field("element", value_type, nullable=False), prod(shape))
    return pa.field(name, values, nullable=False, metadata={SHAPE_KEY: json.dumps(shape)})


def array_column(field: pa.Field, values: NDArray[Any]) -> pa.Array:
    """Return values of shape [samples, *sample shape] as a column with the field of `array_field`."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=field.type)


def write_shards(
    store: Store,
    rows: Iterable[pa.Table | pa.RecordBatch],
    schema: pa.Schema,
    num_rows: int,
    num_shards: int,
    row_group_bytes: int = ROW_GROUP_BYTES,
    advance: Callable[[int], None] = lambda rows: None,
) -> Manifest:
    """Write `rows` as a data set and return its manifest.

    Args:
        store: Folder to write to; a data set that an earlier call wrote there is deleted first.
        rows: Tables of rows, read as a stream; about one row group and one table are in memory at a time.
        schema: Schema of every table in `rows`.
        num_rows: Number of rows in all tables.
        num_shards: Number of files. Each file has consecutive rows, and the row counts differ by at most one. No file is empty, so there
            are fewer files if there are fewer rows.
        row_group_bytes: Size of a row group in memory, in bytes; the last row group of a shard can be smaller.
        advance: Progress callback, called with the number of rows after each row group.
    """
    check_sizes(store, num_rows, num_shards, row_group_bytes)
    clear(store)
    store.check_writable()
    shards = min(num_shards, num_rows)
    sizes = [
        stop - start for start, stop in itertools.pairwise(shard * num_rows // shards for shard in range(shards + 1))
    ]
    source = _Rows(rows, schema)
    try:
        for shard, size in enumerate(sizes):
            _write_shard(store, f"part-{shard:05d}.parquet", schema, source.groups(size, row_group_bytes), advance)
        source.check_empty(num_rows)
    except BaseException:
        clear(store)
        raise
    return index(store.url)


def check_sizes(store: Store, num_rows: int, num_shards: int, row_group_bytes: int) -> None:
    """Check the sizes of a data set. Call this before `clear`, so that a mistake does not delete the previous data set.

    Raises:
        UndulaError: A size is less than 1.
    """
    if min(num_rows, num_shards, row_group_bytes) < 1:
        raise UndulaError(
            f"cannot write {store.url} with {num_rows} rows, {num_shards} shards and row groups of {row_group_bytes} "
            "bytes; each of them must be at least 1"
        )


def clear(store: Store) -> None:
    """Delete a data set that `write_shards` wrote: its manifest first, then its shards.

    Raises:
        ManifestError: The folder has other Parquet files.
    """
    shards = [entry.name for entry in store.list() if entry.name.lower().endswith(PARQUET)]
    for name in shards:
        if not _SHARD_NAME.fullmatch(name):
            raise ManifestError(
                f"{store.url}/{name} would become part of the data set, which includes all Parquet files below its URL; "
                "choose another URL or move the file away"
            )
    for name in (MANIFEST_NAME, FORMER_NAME):
        store.delete(name)
    for name in shards:
        store.delete(name)


class _Rows:
    """Rows of a stream of tables, taken one row group at a time."""

    def __init__(self, tables: Iterable[pa.Table | pa.RecordBatch], schema: pa.Schema):
        self._tables = iter(tables)
        self._rest = schema.empty_table()
        self._schema = schema

    def groups(self, num_rows: int, most_bytes: int) -> Iterator[pa.Table]:
        """Yield the next `num_rows` rows in tables of about `most_bytes`."""
        missing = num_rows
        while missing:
            group = self._take(missing, most_bytes)
            missing -= group.num_rows
            yield group

    def check_empty(self, num_rows: int) -> None:
        """Check that no rows are left.

        Raises:
            UndulaError: The source has more rows than it announced.
        """
        if self._refill():
            raise UndulaError(
                f"the source has more than the {num_rows} rows that it announced; do not change it while it is read"
            )

    def _take(self, most_rows: int, most_bytes: int) -> pa.Table:
        taken: list[pa.Table] = []
        num_rows, num_bytes = 0, 0
        while num_rows < most_rows and num_bytes < most_bytes and self._refill():
            row_bytes = max(self._rest.nbytes / self._rest.num_rows, 1.0)
            count = min(max(round((most_bytes - num_bytes) / row_bytes), 1), most_rows - num_rows)
            rows, self._rest = self._rest.slice(0, count), self._rest.slice(count)
            taken.append(rows)
            num_rows += rows.num_rows
            num_bytes += rows.nbytes
        if not taken:
            raise UndulaError(
                f"the source ended {most_rows} rows before the end of a shard; do not change it while it is read"
            )
        return pa.concat_tables(taken).combine_chunks()

    def _refill(self) -> bool:
        """Load the next rows into `_rest` if it is empty, and return whether it has any."""
        while not self._rest.num_rows:
            table = next(self._tables, None)
            if table is None:
                return False
            self._rest = table if isinstance(table, pa.Table) else pa.Table.from_batches([table], self._schema)
        return True


def _write_shard(
    store: Store, name: str, schema: pa.Schema, groups: Iterable[pa.Table], advance: Callable[[int], None]
) -> None:
    content = sha256()
    with _writing(store, name):
        writer = pq.ParquetWriter(store.path(name), schema, filesystem=store.filesystem, compression="zstd")
    try:
        for group in groups:
            for batch in group.to_batches():
                content.update(batch.serialize())
            with _writing(store, name):
                writer.write_table(group, row_group_size=group.num_rows)
            advance(group.num_rows)
        writer.add_key_value_metadata({CONTENT_KEY: content.hexdigest()})
    finally:
        with _writing(store, name):
            writer.close()


@contextmanager
def _writing(store: Store, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {store.url}/{name}: {' '.join(str(error).split())}") from error
