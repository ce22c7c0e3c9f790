"""Conversion of other formats to tables of columns that batches support, and a global shuffle of the rows."""

import itertools
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset

from undula.data.manifest import NUMBER_TYPES, TEXT_TYPES
from undula.data.write import array_field
from undula.errors import ManifestError
from undula.plan.keys import key64, permuted
from undula.storage import open_store

BUCKET_BYTES = 256 * 2**20
"""Approximate size in bytes of the rows that a global shuffle holds in memory at once."""
TAR_BATCH = 256
"""Number of samples of a tar archive in one table."""


@dataclass(frozen=True)
class Source:
    """Rows of a source in any format. Each call of `tables` iterates over all rows again."""

    num_rows: int
    schema: pa.Schema
    tables: Callable[[], Iterator[pa.Table]]


def open_source(url: str, columns: tuple[str, ...] | None = None) -> Source:
    """Open a path or s3:// URL: Parquet, CSV or JSON lines files, WebDataset tars, or a folder written by `datasets.save_to_disk`.

    Lists of equal length become fixed-size lists. A struct with a field `bytes`, as `datasets` uses for images, becomes the bytes.

    Raises:
        ManifestError: The URL has no file of a known format, or a column has a type that batches do not support.
    """
    names = [entry.name for entry in open_store(url).list()] or [Path(url).name]
    found = [(reader, [name for name in names if name.endswith(ends)]) for reader, ends in _READERS]
    reader, files = next(((reader, files) for reader, files in found if files), (None, []))
    if reader is None:
        known = ", ".join(f"*{end}" for _, ends in _READERS for end in ends)
        raise ManifestError(f"{url} has no files to convert; supported files are {known}")
    raw = reader(url, files)
    first = next(raw(), None)
    if first is None or not first.num_rows:
        raise ManifestError(f"{url} has no rows to convert")
    if columns and (missing := [name for name in columns if name not in first.column_names]):
        raise ManifestError(f"{url} has no column {missing[0]!r}; its columns are {', '.join(first.column_names)}")
    schema = _target(first.select(columns) if columns else first, url)

    def tables() -> Iterator[pa.Table]:
        done = 0
        for table in raw():
            yield _converted(table, schema, url, done)
            done += table.num_rows

    return Source(sum(table.num_rows for table in raw()), schema, tables)


def shuffled(source: Source, seed: int) -> Source:
    """Return the source with all rows shuffled by the seed.

    Each row is put into a random bucket on disk. The rows of a bucket are then permuted in memory.
    """

    def tables() -> Iterator[pa.Table]:
        with tempfile.TemporaryDirectory(prefix="undula-shuffle-") as folder:
            for number, bucket in enumerate(_random_buckets(source, seed, Path(folder))):
                order = permuted(np.arange(bucket.num_rows), bucket.num_rows, key64("bucket", seed, number))
                yield bucket.take(pa.array(order))

    return Source(source.num_rows, source.schema, tables)


def _random_buckets(source: Source, seed: int, folder: Path) -> Iterator[pa.Table]:
    num_bytes = sum(table.nbytes for table in source.tables())
    count = max(-(-num_bytes // BUCKET_BYTES), 1)
    files = [folder / f"{number}.arrow" for number in range(count)]
    draws = np.random.Generator(np.random.Philox(key=key64("deal", seed)))
    with ExitStack() as stack:
        writers = [stack.enter_context(pa.ipc.new_file(str(file), source.schema)) for file in files]
        for table in source.tables():
            buckets = draws.integers(0, count, table.num_rows)
            for number, writer in enumerate(writers):
                writer.write_table(table.filter(pa.array(buckets == number)))
    for file in files:
        with pa.memory_map(str(file)) as mapped:
            yield pa.ipc.open_file(mapped).read_all()


def _with_pyarrow(kind: str) -> Callable[[str, list[str]], Callable[[], Iterator[pa.Table]]]:
    def reader(url: str, files: list[str]) -> Callable[[], Iterator[pa.Table]]:
        store = open_store(url)
        paths = [store.path(name) for name in files] if store.list() else [store.path()]
        data = pyarrow.dataset.dataset(paths, format=kind, filesystem=store.filesystem)

        def tables() -> Iterator[pa.Table]:
            try:
                yield from (pa.Table.from_batches([batch]) for batch in data.to_batches() if batch.num_rows)
            except pa.ArrowInvalid as error:
                detail = " ".join(str(error).split())
                raise ManifestError(f"{url} has rows that do not fit the types of its first rows: {detail}") from error

        return tables

    return reader


def _saved_to_disk(url: str, files: list[str]) -> Callable[[], Iterator[pa.Table]]:
    store = open_store(url)

    def tables() -> Iterator[pa.Table]:
        for name in sorted(files):
            with store.open(name) as file:
                for batch in pa.ipc.open_stream(file):
                    if batch.num_rows:
                        yield pa.Table.from_batches([batch])

    return tables


def _tars(url: str, files: list[str]) -> Callable[[], Iterator[pa.Table]]:
    """Read WebDataset tars. The members of a sample share the name up to the first dot; the rest of the name is the column."""
    store = open_store(url)

    def samples() -> Iterator[dict[str, Any]]:
        for name in sorted(files):
            with store.open(name) as raw, tarfile.open(fileobj=raw, mode="r|*") as archive:
                sample: dict[str, Any] = {}
                for member in archive:
                    content = archive.extractfile(member) if member.isfile() else None
                    if content is None:
                        continue
                    folder, _, base = member.name.rpartition("/")
                    stem, _, column = base.partition(".")
                    key = f"{folder}/{stem}" if folder else stem
                    if sample and sample["key"] != key:
                        yield sample
                        sample = {}
                    sample |= {column.replace(".", "_"): _member(f"{name}: {member.name}", content.read()), "key": key}
                if sample:
                    yield sample

    def tables() -> Iterator[pa.Table]:
        left = samples()
        names: dict[str, None] = {}
        while batch := list(itertools.islice(left, TAR_BATCH)):
            found = {name: sample["key"] for sample in reversed(batch) for name in sample}
            new = [name for name in found if name not in names]
            if names and new:
                raise ManifestError(
                    f"sample {found[new[0]]!r} of {url} has a member {new[0]!r}, which none of the first {TAR_BATCH} samples has; "
                    "give every sample the same members"
                )
            names = names or {name: None for sample in batch for name in sample}
            yield pa.table({name: [sample.get(name) for sample in batch] for name in names})

    return tables


def _member(name: str, data: bytes) -> bytes | int | str:
    """Decode a member by its file extension: an int for class labels, a str for text, otherwise bytes."""
    extension = name.rpartition(".")[2]
    try:
        if extension in ("cls", "index"):
            return int(data)
        return data.decode() if extension in ("txt", "text", "json") else data
    except ValueError as error:
        raise ManifestError(f"the content of {name} does not match its file extension: {error}") from error


_READERS: list[tuple[Callable[[str, list[str]], Callable[[], Iterator[pa.Table]]], tuple[str, ...]]] = [
    (_with_pyarrow("parquet"), (".parquet",)),
    (_saved_to_disk, (".arrow",)),
    (_tars, (".tar", ".tar.gz", ".tgz")),
    (_with_pyarrow("csv"), (".csv",)),
    (_with_pyarrow("json"), (".jsonl", ".ndjson", ".json")),
]


def _target(table: pa.Table, url: str) -> pa.Schema:
    """Return the schema to write for tables like this one."""
    fields = []
    for field in table.schema:
        array = table[field.name].combine_chunks()
        _refuse_nulls(array, field.name, url, 0)
        shape, values = _shape(array)
        if str(values) not in NUMBER_TYPES | TEXT_TYPES or (shape and str(values) in TEXT_TYPES):
            raise ManifestError(
                f"column {field.name!r} of {url} has type {field.type}, which batches do not support; leave it out by naming the "
                "other columns with --columns, or convert it to numbers, lists of equal length, strings or bytes"
            )
        fields.append(array_field(field.name, values, shape) if shape else pa.field(field.name, values))
    return pa.schema(fields)


def _refuse_nulls(array: pa.Array, name: str, url: str, first_row: int, per_row: int = 1) -> None:
    if array.null_count:
        place = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0]) // per_row
        raise ManifestError(
            f"column {name!r} of {url} has a null in or near row {first_row + place}, which tensors cannot hold; replace it or leave the "
            "column out with --columns"
        )


def _shape(array: pa.Array) -> tuple[tuple[int, ...], pa.DataType]:
    """Return the shape of a column's first sample and the type of its values."""
    shape: list[int] = []
    array = _plain(array)
    while _is_list(array.type):
        shape.append(array.type.list_size if pa.types.is_fixed_size_list(array.type) else len(array[0]))
        array = _plain(array.flatten())
    return tuple(shape), array.type


def _plain(array: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    if pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        return array.field("bytes")
    return array


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _converted(table: pa.Table, schema: pa.Schema, url: str, first_row: int) -> pa.Table:
    arrays = []
    for field in schema:
        array = _plain(table[field.name].combine_chunks())
        _refuse_nulls(array, field.name, url, first_row)
        shape = tuple(json.loads((field.metadata or {}).get(b"shape", b"[]")))
        for depth, size in enumerate(shape):
            if not pa.types.is_fixed_size_list(array.type):
                lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
                if (wrong := np.flatnonzero(lengths != size)).size:
                    raise ManifestError(
                        f"column {field.name!r} of {url} has a list of {lengths[wrong[0]]:.0f} values in or near row "
                        f"{first_row + int(wrong[0])}, but the first row has {size}; pad the lists "
                        "to one length or leave the column out with --columns"
                    )
            array = _plain(array.flatten())
            _refuse_nulls(array, field.name, url, first_row, per_row=prod(shape[: depth + 1]))
        if shape:
            values = array.cast(field.type.value_type)
            array = pa.FixedSizeListArray.from_arrays(values, type=field.type)
            assert len(array) * prod(shape) == len(values)
        arrays.append(array if shape else array.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)
