"""Write a data set of sharded Parquet: the shards, then the manifest, so that no reader sees a manifest of other files."""

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

from undula.data.manifest import MANIFEST_NAME, SHAPE_KEY, Manifest, index
from undula.errors import ManifestError, StorageError, UndulaError
from undula.storage import Store

ROW_GROUP_BYTES = 4 * 2**20
CONTENT_KEY = "undula.sha256"
"""Footer metadata: a hash of the shard's rows. Sizes and statistics alone can stay equal when a row changes."""

_SHARD_NAME = re.compile(r"part-\d{5,}\.parquet")


def array_field(name: str, value_type: pa.DataType, shape: tuple[int, ...]) -> pa.Field:
    """The field of a column that holds an array of `shape` for each sample."""
    values = pa.list_(pa.field("element", value_type, nullable=False), prod(shape))
    return pa.field(name, values, nullable=False, metadata={SHAPE_KEY: json.dumps(shape)})


def array_column(field: pa.Field, values: NDArray[Any]) -> pa.Array:
    """Values of shape [samples, *sample shape] as a column of `array_field`."""
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
    """Write `rows` as a data set, in place of the one that was there, and return its manifest.

    Args:
        store: where; a data set that `write_shards` left there goes first.
        rows: the data, streamed; at most about a row group and one of its tables is held at a time.
        schema: of every table in `rows`.
        num_rows: how many rows there are.
        num_shards: files, in which consecutive rows lie; their row counts differ by one at most. No shard is empty,
            so that there are fewer where there are fewer rows.
        row_group_bytes: bytes of a row group in memory; its last rows in a shard may make a smaller one.
        advance: called with the number of rows after each row group, for a progress bar.
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
    """UndulaError where a data set cannot have these sizes; to be asked before the former one is cleared."""
    if min(num_rows, num_shards, row_group_bytes) < 1:
        raise UndulaError(
            f"cannot write {store.url} with {num_rows} rows, {num_shards} shards and row groups of {row_group_bytes} "
            "bytes: each must be at least 1"
        )


def clear(store: Store) -> None:
    """Remove the data set that `write_shards` left: its manifest first, then its shards."""
    shards = [entry.name for entry in store.list() if entry.name.endswith(".parquet")]
    for name in shards:
        if not _SHARD_NAME.fullmatch(name):
            raise ManifestError(
                f"{store.url}/{name} would become part of the data set, which is all .parquet files below its URL: "
                "give another URL, or move the file away"
            )
    store.delete(MANIFEST_NAME)
    for name in shards:
        store.delete(name)


class _Rows:
    """The rows of a stream of tables, taken one row group at a time."""

    def __init__(self, tables: Iterable[pa.Table | pa.RecordBatch], schema: pa.Schema):
        self._tables = iter(tables)
        self._rest = schema.empty_table()
        self._schema = schema

    def groups(self, num_rows: int, most_bytes: int) -> Iterator[pa.Table]:
        """The next `num_rows` rows, as tables of about `most_bytes`."""
        missing = num_rows
        while missing:
            group = self._take(missing, most_bytes)
            missing -= group.num_rows
            yield group

    def check_empty(self, num_rows: int) -> None:
        """Raise UndulaError where rows are left."""
        if self._refill():
            raise UndulaError(
                f"the source has more than the {num_rows} rows that it announced: did it change meanwhile?"
            )

    def _take(self, most_rows: int, most_bytes: int) -> pa.Table:
        taken: list[pa.Table] = []
        num_rows, num_bytes = 0, 0
        while num_rows < most_rows and num_bytes < most_bytes and self._refill():
            row_bytes = max(self._rest.nbytes / self._rest.num_rows, 1.0)
            count = min(max(round((most_bytes - num_bytes) / row_bytes), 1), most_rows - num_rows)
            piece, self._rest = self._rest.slice(0, count), self._rest.slice(count)
            taken.append(piece)
            num_rows += piece.num_rows
            num_bytes += piece.nbytes
        if not taken:
            raise UndulaError(f"the source ended {most_rows} rows before the end of a shard: did it change meanwhile?")
        return pa.concat_tables(taken).combine_chunks()

    def _refill(self) -> bool:
        """Whether a row is left, brought into `_rest`."""
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
