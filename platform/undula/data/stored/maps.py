"""Transforms of single samples. They run where the rows are read, and their results do not depend on the world size."""

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from undula.data.script.pickling import dumps_by_value
from undula.data.stored.manifest import ID_COLUMN, NUMBER_TYPES, TEXT_TYPES, Column
from undula.errors import UsageError
from undula.plan.keys import subkeys

Sample = Mapping[str, Any]
"""Values of one sample by column name: NumPy arrays of the sample's shape, NumPy scalars, str or bytes."""
SampleFunction = Callable[[Sample, np.random.Generator], Sample]
"""Function that transforms a sample, given a random generator."""

Kind = tuple[str, tuple[int, ...]]
"""Arrow type and shape of a value."""
TEXT_KINDS: Mapping[type, str] = {str: "string", bytes: "binary"}
"""Arrow types of the texts that a map can return. NumPy's own types would drop trailing zeros of bytes."""


@dataclass(frozen=True)
class SampleMap:
    """Function applied to every row of a table.

    Its random generator is keyed by (key, sample id), so augmentation does not depend on which process reads a sample, or when.
    """

    function: SampleFunction
    key: int
    url: str
    """URL of the data set, for messages."""
    result: tuple[Column, ...]
    """Columns that the function must return for every sample. They are known before any row is read, because the columns of a batch
    would otherwise depend on which samples a process has read first."""

    def __reduce__(self) -> tuple[Callable[[bytes], "SampleMap"], tuple[bytes]]:
        return _loaded, (dumps_by_value(tuple(vars(self).values())),)

    def __call__(self, table: pa.Table, columns: tuple[Column, ...]) -> pa.Table:
        """Return the table of the transformed rows and their ids.

        Raises:
            ManifestError: The rows have nulls.
            UsageError: The function returns values that batches cannot hold, or other columns than for the first sample of the data.
        """
        schema = pa.schema([*map(_field, self.result), (ID_COLUMN, pa.int64())])
        # The rows are not combined, because one Arrow array cannot hold 2 GiB of text.
        parts = [self._mapped(batch, columns, schema) for batch in table.to_batches()]
        return pa.concat_tables(parts) if parts else schema.empty_table()

    def _mapped(self, rows: pa.RecordBatch, columns: tuple[Column, ...], schema: pa.Schema) -> pa.Table:
        made = [(column, (column.type, column.shape), _rows_of(column, rows.num_rows)) for column in self.result]
        names = {column.name for column in self.result}
        for place, (where, sample) in enumerate(_results(self.function, self.key, self.url, rows, columns)):
            if sample.keys() != names:
                raise UsageError(
                    f"the map returned the columns {list(sample)} for {where}, but {[column.name for column in self.result]} for the "
                    "first sample of the data; return the same columns for every sample"
                )
            for column, kind, values in made:
                given, value = _typed(column.name, sample[column.name], where)
                if given != kind:
                    raise UsageError(
                        f"the map returned {column.name!r} as {_described(*given)} for {where}, but as {_described(*kind)} for the first "
                        "sample of the data; return one type and shape for every sample"
                    )
                values[place] = value  # a copy: the function may use the memory again for the next sample
        arrays = [_array(column, values) for column, _, values in made]
        return pa.Table.from_arrays([*arrays, rows[ID_COLUMN]], schema=schema)


def _loaded(content: bytes) -> SampleMap:
    return SampleMap(*pickle.loads(content))


def result_columns(
    function: SampleFunction, key: int, url: str, row: pa.Table, columns: tuple[Column, ...]
) -> tuple[Column, ...]:
    """Return the columns that a function returns for the row of a table.

    Raises:
        ManifestError: The row has nulls.
        UsageError: The function returns values that batches cannot hold.
    """
    (rows,) = row.to_batches()
    ((where, sample),) = _results(function, key, url, rows, columns)
    return tuple(Column(name, *_typed(name, value, where)[0]) for name, value in sample.items())


def _results(
    function: SampleFunction, key: int, url: str, rows: pa.RecordBatch, columns: tuple[Column, ...]
) -> Iterator[tuple[str, Sample]]:
    """Yield what the function returns for each row, after the name of the sample for messages."""
    ids = rows[ID_COLUMN].to_numpy()
    values = {column.name: _values(rows[column.name], column) for column in columns}
    for place, (row, subkey) in enumerate(zip(ids.tolist(), subkeys(key, ids).tolist(), strict=True)):
        where = f"sample {row} of {url}"
        sample = {name: of[place] for name, of in values.items()}
        try:
            made = function(sample, np.random.Generator(np.random.Philox(key=subkey)))
        except Exception as error:
            error.add_note(f"raised by the map for {where}")
            raise
        if not isinstance(made, Mapping):
            raise UsageError(f"the map returned {type(made).__name__} for {where}; return a dict of columns")
        yield where, made


def _values(array: pa.Array, column: Column) -> Any:
    return column.values(array).to_pylist() if column.type in TEXT_TYPES else column.numbers(array)


def _typed(name: object, value: object, where: str) -> tuple[Kind, Any]:
    """Return the type and shape of a column that can hold a value exactly, and the value as text or as an array."""
    if not isinstance(name, str) or name == ID_COLUMN:
        raise UsageError(f"the map returned a column named {name!r} for {where}; columns have other strings as names")
    for kind, text_type in TEXT_KINDS.items():
        if isinstance(value, kind):
            if isinstance(value, str) and not value.isascii() and not _is_unicode(value):
                raise _unsupported(name, "a str with surrogates", where)
            return (text_type, ()), value
    if isinstance(value, np.ma.MaskedArray):
        raise _unsupported(name, "a masked array", where)
    try:
        array = np.asarray(value)
    except Exception as error:  # a list of lists of several lengths, or a tensor that NumPy has no type for
        raise _unsupported(name, f"{type(value).__name__} ({error})", where) from error
    arrow_type = _arrow_type(array.dtype)
    if arrow_type is None:
        given = type(value).__name__ if array.dtype == object else f"{type(value).__name__} of type {array.dtype}"
        raise _unsupported(name, given, where)
    if not array.size:
        raise _unsupported(name, f"an empty array of shape {list(array.shape)}", where)
    if isinstance(value, list | tuple) and _is_rounded(value, array):
        raise _unsupported(name, f"{type(value).__name__} with integers that {array.dtype} would round", where)
    return (arrow_type, array.shape), array


def _unsupported(name: str, given: str, where: str) -> UsageError:
    return UsageError(
        f"the map returned {name!r} as {given} for {where}, which batches cannot hold; return numbers, an array of numbers, a str or bytes"
    )


def _is_rounded(value: list[Any] | tuple[Any, ...], array: NDArray[Any]) -> bool:
    """Return whether NumPy has rounded an integer, because real numbers are in the same list."""
    return array.dtype.kind == "f" and any(
        isinstance(given, int | np.integer) and int(given) != float(number)
        for given, number in zip(np.array(value, dtype=object).flat, array.flat, strict=True)
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@cache
def _arrow_type(dtype: np.dtype[Any]) -> str | None:
    """Return the Arrow type that holds NumPy's numbers exactly, in any byte order; None if there is none."""
    try:
        name = str(pa.from_numpy_dtype(dtype))
    except pa.ArrowNotImplementedError:
        return None
    return name if name in NUMBER_TYPES else None


def _dtype(arrow_type: str) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(pa.type_for_alias(arrow_type).to_pandas_dtype())
    return dtype


def _described(arrow_type: str, shape: tuple[int, ...]) -> str:
    """Return a type and a shape in the terms of Python and NumPy."""
    names = {text_type: kind.__name__ for kind, text_type in TEXT_KINDS.items()}
    return names.get(arrow_type) or f"{_dtype(arrow_type)}{list(shape)}"


def _field(column: Column) -> pa.Field:
    value_type = pa.type_for_alias(column.type)
    if not column.shape:
        return pa.field(column.name, value_type)
    return pa.field(column.name, pa.list_(pa.field("element", value_type, nullable=False), prod(column.shape)))


def _rows_of(column: Column, count: int) -> NDArray[Any] | list[str | bytes]:
    return [b""] * count if column.type in TEXT_TYPES else np.empty((count, *column.shape), _dtype(column.type))


def _array(column: Column, values: NDArray[Any] | list[str | bytes]) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, list):
        return pa.array(values, pa.type_for_alias(column.type))
    flat = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, type=_field(column).type) if column.shape else flat
