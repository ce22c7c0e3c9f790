"""Transforms of single samples. They run where the rows are read, and their results do not depend on the world size."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from undula.data.manifest import ID_COLUMN, SHAPE_KEY, TEXT_TYPES, Column, column_of
from undula.errors import ManifestError
from undula.plan.keys import Ids, subkeys

Sample = Mapping[str, Any]
"""Values of one sample by column name: NumPy arrays of the sample's shape, NumPy scalars, str or bytes."""
SampleFunction = Callable[[Sample, np.random.Generator], Sample]
"""Function that transforms a sample, given a random generator."""

TEXT_KINDS: Mapping[type, pa.DataType] = {str: pa.string(), bytes: pa.binary()}
"""Arrow types of the texts that a map can return. NumPy's own types would drop trailing zeros of bytes."""


@dataclass(frozen=True)
class SampleMap:
    """Function applied to every row of a table.

    Its random generator is keyed by (key, sample id), so augmentation does not depend on which process reads a sample, or when.
    """

    function: SampleFunction
    key: int

    def __call__(self, table: pa.Table, columns: tuple[Column, ...]) -> pa.Table:
        """Return the table of the transformed rows and their ids.

        Raises:
            ManifestError: The rows have nulls, or the function returns values that batches cannot hold.
        """
        ids = table[ID_COLUMN].to_numpy()
        values = {column.name: _values(table[column.name].combine_chunks(), column) for column in columns}
        made = [
            self.function(
                {name: of[row] for name, of in values.items()}, np.random.Generator(np.random.Philox(key=key))
            )
            for row, key in enumerate(subkeys(self.key, ids).tolist())
        ]
        if not made:
            return table
        names = list(made[0])
        for sample, row in zip(made, ids, strict=True):
            if list(sample) != names:
                raise ManifestError(
                    f"the map returned columns {list(sample)} for sample {row} but {names} for another; "
                    "return the same columns for every sample"
                )
        arrays = [_column(name, [sample[name] for sample in made], ids) for name in names]
        fields = [field for field, _ in arrays]
        return pa.Table.from_arrays(
            [array for _, array in arrays] + [pa.array(ids)], schema=pa.schema([*fields, (ID_COLUMN, pa.int64())])
        )


def mapped_columns(table: pa.Table) -> tuple[Column, ...]:
    """Return the columns of a table that a map has produced."""
    return tuple(column_of(field, "the map's result") for field in table.schema if field.name != ID_COLUMN)


def _values(array: pa.Array, column: Column) -> Any:
    values = column.values(array)
    return (
        values.to_pylist()
        if column.type in TEXT_TYPES
        else values.to_numpy(zero_copy_only=False).reshape(-1, *column.shape)
    )


def _column(name: str, values: list[Any], ids: Ids) -> tuple[pa.Field, pa.Array]:
    for kind, arrow_type in TEXT_KINDS.items():
        if isinstance(values[0], kind):
            if wrong := [place for place, value in enumerate(values) if not isinstance(value, kind)]:
                raise ManifestError(
                    f"the map returned {name!r} as {type(values[wrong[0]]).__name__} for sample {ids[wrong[0]]} but as {kind.__name__} "
                    "for another; return one type for every sample"
                )
            return pa.field(name, arrow_type), pa.array(values, arrow_type)
    arrays = [np.asarray(value) for value in values]
    for array, row in zip(arrays, ids, strict=True):
        if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
            raise ManifestError(
                f"the map returned {name!r} as {array.dtype}{list(array.shape)} for sample {row} but as "
                f"{arrays[0].dtype}{list(arrays[0].shape)} for another; return one shape and type for every sample"
            )
    stacked = np.stack(arrays)
    if stacked.dtype == object:
        raise ManifestError(
            f"the map returned {name!r} as {type(values[0]).__name__}; return numbers, an array, a str or bytes"
        )
    flat = pa.array(stacked.reshape(-1))
    if stacked.ndim == 1:
        return pa.field(name, flat.type), flat
    element = pa.field("element", flat.type, nullable=False)
    array = pa.FixedSizeListArray.from_arrays(flat, type=pa.list_(element, int(np.prod(stacked.shape[1:]))))
    return pa.field(name, array.type, metadata={SHAPE_KEY: json.dumps(stacked.shape[1:])}), array
