"""Reading of files of tables of any format. Files that are read together get one schema, or are refused by name."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset

from undula.data.prepare.text_files import csv_integers, exact, json_integers, open_csv, open_json
from undula.data.stored.manifest import SHAPE_KEY, column_of
from undula.data.stored.shards import ENCRYPTED
from undula.errors import ManifestError
from undula.storage import Store

BATCH_ROWS = 2**14
"""Maximum number of rows of a Parquet file in one table."""
OPEN_AT_ONCE = 16
"""Number of files of which the schema is read at the same time."""
NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""Value in the name of a Hive partition that stands for null."""

RAY_TENSOR = "ray.data.arrow_tensor"
"""Beginning of the names of Ray Data's types for tensors of one shape."""

Opener = Callable[[Store, str, Sequence[str] | None], pa.RecordBatchReader]
"""Function that opens a file and returns the reader of its rows; of Parquet files, only of the given columns."""


@dataclass(frozen=True)
class TableFiles:
    """Files of one format with the same columns, in order.

    The columns of all files are those of each file, or the files are refused. Types that differ are promoted to a type that holds the
    values of both. The folders `key=value/` of Hive partitions become columns of type int32 or string, as in `pyarrow.dataset`, unless
    the files have the column themselves.
    """

    store: Store
    names: tuple[str, ...]
    open: Opener
    columns: tuple[str, ...] | None = None
    """Columns to keep; None for all."""

    @cached_property
    def schema(self) -> pa.Schema:
        """Schema of all tables.

        Raises:
            ManifestError: The files have different columns, or types without a common one.
        """

        def schema_of(name: str) -> pa.Schema:
            with self._errors(name):
                return self.open(self.store, name, None).schema

        with ThreadPoolExecutor(OPEN_AT_ONCE) as threads:
            schemas = list(threads.map(schema_of, self.names))
        return _common_schema(self.store.url, self.names, self._with_partitions(schemas), self.columns)

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows of all files in tables with the schema."""
        for name in self.names:
            values = partitions_of(name)
            with self._errors(name):
                reader = self.open(self.store, name, None if self.columns is None else self.schema.names)
                own = set(reader.schema.names)
                for batch in self._exact(reader, name):
                    if batch.num_rows:
                        arrays = [
                            self._column(batch, field, name, None if field.name in own else values[field.name])
                            for field in self.schema
                        ]
                        yield pa.Table.from_arrays(arrays, schema=self.schema)

    def _exact(self, reader: pa.RecordBatchReader, name: str) -> Iterable[pa.RecordBatch]:
        batches: Iterable[pa.RecordBatch] = reader
        if self.open not in (open_csv, open_json):
            return batches
        reread = csv_integers if self.open is open_csv else json_integers
        return exact(reader, self.schema.names, partial(reread, self.store, name), f"{self.store.url}/{name}")

    def _column(self, batch: pa.RecordBatch, field: pa.Field, name: str, partition: str | None) -> pa.Array:
        if partition is not None:
            value = None if partition == NO_PARTITION else partition
            return pa.repeat(pa.scalar(value, pa.string()), batch.num_rows).cast(field.type)
        try:
            array = _plain(batch, field.name, f"{self.store.url}/{name}")
            return array if array.type == field.type else array.cast(field.type)
        except pa.ArrowInvalid as error:
            raise ManifestError(
                f"column {field.name!r} of {self.store.url}/{name} has values that the type of the other files, "
                f"{field.type}, does not hold exactly: {_line(error)}; write all files with one type"
            ) from error

    def _with_partitions(self, schemas: list[pa.Schema]) -> list[pa.Schema]:
        partitions = [partitions_of(name) for name in self.names]
        types = {}
        for key in dict.fromkeys(key for values in partitions for key in values):
            values = pa.array([values[key] for values in partitions if values.get(key, NO_PARTITION) != NO_PARTITION])
            types[key] = pa.int32() if _are_int32(values) else pa.string()
        for place, values in enumerate(partitions):
            for key in values:
                if key not in schemas[place].names:
                    schemas[place] = schemas[place].append(pa.field(key, types[key]))
        return schemas

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if "decrypt" in str(error).replace(self.store.path(name), ""):
                raise ManifestError(ENCRYPTED.format(f"{self.store.url}/{name}")) from error
            raise ManifestError(
                f"cannot read {self.store.url}/{name}: {_line(error)}; the types of a CSV or JSON lines file are those of its "
                "first rows, and other files must be intact"
            ) from error


def open_parquet(store: Store, name: str, columns: Sequence[str] | None) -> pa.RecordBatchReader:
    """Open a Parquet file."""
    fragment = pyarrow.dataset.ParquetFileFormat().make_fragment(store.path(name), store.filesystem)
    names = [name for name in fragment.physical_schema.names if columns is None or name in columns]
    return fragment.scanner(columns=names, batch_size=BATCH_ROWS).to_reader()


def open_arrow(store: Store, name: str, columns: Sequence[str] | None) -> pa.RecordBatchReader:
    """Open an Arrow stream, as `datasets` writes them, or an Arrow file, as Feather and Polars write them."""
    file = store.open(name)
    if file.read(6) != b"ARROW1":
        file.seek(0)
        return pa.ipc.open_stream(file)
    reader = pa.ipc.open_file(file)
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    return pa.RecordBatchReader.from_batches(reader.schema, batches)


def partitions_of(name: str) -> dict[str, str]:
    """Return the Hive partitions of a file: the folders of its name with the form `key=value`."""
    pairs = (folder.split("=", 1) for folder in name.split("/")[:-1] if "=" in folder)
    return {key: unquote(value) for key, value in pairs}


def _common_schema(
    url: str, names: Sequence[str], schemas: Sequence[pa.Schema], columns: Sequence[str] | None
) -> pa.Schema:
    """Return the schema of all files, with the columns in the order of the first file or of `columns`."""
    kept = columns or tuple(dict.fromkeys(name for schema in schemas for name in schema.names))
    known: dict[str, tuple[pa.DataType, str]] = {}
    for file, schema in zip(names, schemas, strict=True):
        for column in kept:
            count = len(schema.get_all_field_indices(column))
            if count == 0:
                raise ManifestError(_missing(url, column, file, names, schemas))
            if count > 1:
                raise ManifestError(f"{url}/{file} has {count} columns with the name {column!r}; rename them")
            kind = _type_of(schema.field(column), f"{url}/{file}")
            before, first = known.get(column, (kind, file))
            known[column] = (_promoted(before, kind, f"column {column!r} of {url}", first, file), first)
    return pa.schema([(column, kind) for column, (kind, _) in known.items()])


def _missing(url: str, column: str, file: str, names: Sequence[str], schemas: Sequence[pa.Schema]) -> str:
    owner = next((name for name, schema in zip(names, schemas, strict=True) if column in schema.names), None)
    if owner is None:
        return f"{url} has no column {column!r}; its columns are {', '.join(schemas[0].names)}"
    return (
        f"{url}/{owner} has a column {column!r}, but {file} does not; give all files the same columns, or name columns "
        "that all of them have with --columns"
    )


def _promoted(one: pa.DataType, other: pa.DataType, what: str, first: str, file: str) -> pa.DataType:
    """Return a type for the values of two types. The values are checked when they are cast to it."""
    if one == other:
        return one
    try:
        if _is_text(one) != _is_text(other) and pa.null() not in (one, other):
            raise pa.ArrowTypeError  # Arrow would turn strings to bytes
        if _sizes(one) and _sizes(other) and _sizes(one) != _sizes(other):
            raise pa.ArrowTypeError  # Arrow would make lists of any length
        fields = [pa.schema([("column", kind)]) for kind in (one, other)]
        return pa.unify_schemas(fields, promote_options="permissive").field(0).type
    except pa.ArrowTypeError:
        raise ManifestError(
            f"{what} has type {one} in {first} and {other} in {file}; write all files with one type, or leave the column "
            "out by naming the others with --columns"
        ) from None


def _sizes(kind: pa.DataType) -> list[int]:
    """Return the sizes of fixed-size lists in one another."""
    return [kind.list_size, *_sizes(kind.value_type)] if pa.types.is_fixed_size_list(kind) else []


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _type_of(field: pa.Field, where: str) -> pa.DataType:
    """Return the type of a column without the dictionary that encodes its values, and as lists of lists if it has tensors."""
    kind = field.type
    shape = _tensor_shape(field, where)
    if shape is None:
        return kind.value_type if pa.types.is_dictionary(kind) else kind
    nested = getattr(kind, "storage_type", kind).value_type
    for size in reversed(shape):
        nested = pa.list_(nested, size)
    return nested


def _plain(batch: pa.RecordBatch, name: str, where: str) -> pa.Array:
    """Return a column of a batch, as lists of lists if it has tensors."""
    array, shape = batch.column(name), _tensor_shape(batch.schema.field(name), where)
    if shape is None:
        return array
    if array.null_count:
        raise ManifestError(
            f"column {name!r} of {where} has nulls in place of tensors; replace them or leave the column out by naming the others with "
            "--columns"
        )
    values = getattr(array, "storage", array).flatten()
    for size in reversed(shape):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values


def _tensor_shape(field: pa.Field, where: str) -> tuple[int, ...] | None:
    """Return the shape of each value of a column of tensors, as Undula, Arrow and Ray Data write them; None for other columns.

    Arrow knows the types of Ray Data only in a process that has imported Ray.
    """
    metadata = field.metadata or {}
    kind = field.type
    if isinstance(kind, pa.FixedShapeTensorType):
        is_ordered = kind.permutation in (None, [*range(len(kind.shape))])
        return tuple(kind.shape) if is_ordered else None
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name.startswith(RAY_TENSOR):
        return tuple(kind.shape)
    if metadata.get(b"ARROW:extension:name", b"").startswith(RAY_TENSOR.encode()):
        return tuple(json.loads(metadata[b"ARROW:extension:metadata"]))
    return column_of(field, where).shape if SHAPE_KEY in metadata and pa.types.is_fixed_size_list(kind) else None


def _are_int32(values: pa.Array) -> bool:
    try:
        values.cast(pa.int32())
    except pa.ArrowInvalid:
        return False
    return True


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")
