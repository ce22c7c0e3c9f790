"""Per-sample transforms that run where the rows are read, the same at any world size."""

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
"""Columns of one sample by name: NumPy arrays of the sample's shape, NumPy scalars, str or bytes."""
SampleFunction = Callable[[Sample, np.random.Generator], Sample]


@dataclass(frozen=True)
class SampleMap:
    """A function of a sample and a random generator, applied to every row of a table.

    The generator is keyed by (key, sample id), so that augmentation does not depend on who reads the sample, or when.
    """

    function: SampleFunction
    key: int

    def __call__(self, table: pa.Table, columns: tuple[Column, ...]) -> pa.Table:
        """The table of what the function makes of the rows, with their ids."""
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
                    f"the map gave columns {list(sample)} for sample {row} and {names} for another: give the same for each"
                )
        arrays = [_column(name, [sample[name] for sample in made], ids) for name in names]
        fields = [field for field, _ in arrays]
        return pa.Table.from_arrays(
            [array for _, array in arrays] + [pa.array(ids)], schema=pa.schema([*fields, (ID_COLUMN, pa.int64())])
        )


def mapped_columns(table: pa.Table) -> tuple[Column, ...]:
    """The columns of a table that a map made."""
    return tuple(column_of(field, "the map's result") for field in table.schema if field.name != ID_COLUMN)


def _values(array: pa.Array, column: Column) -> Any:
    if column.shape:
        return array.flatten().to_numpy(zero_copy_only=False).reshape(-1, *column.shape)
    if column.type in TEXT_TYPES:
        return array.to_pylist()
    return array.to_numpy(zero_copy_only=False)


def _column(name: str, values: list[Any], ids: Ids) -> tuple[pa.Field, pa.Array]:
    if isinstance(values[0], str):
        return pa.field(name, pa.string()), pa.array(values, pa.string())
    if isinstance(values[0], bytes):  # NumPy's own bytes would lose zeros at the end
        return pa.field(name, pa.binary()), pa.array(values, pa.binary())
    arrays = [np.asarray(value) for value in values]
    for array, row in zip(arrays, ids, strict=True):
        if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
            raise ManifestError(
                f"the map gave {name!r} as {array.dtype}{list(array.shape)} for sample {row} and as "
                f"{arrays[0].dtype}{list(arrays[0].shape)} for another: a batch needs one shape and type"
            )
    stacked = np.stack(arrays)
    if stacked.dtype == object:
        raise ManifestError(f"the map gave {name!r} as {type(values[0]).__name__}: give numbers, an array, or a str")
    flat = pa.array(stacked.reshape(-1))
    if stacked.ndim == 1:
        return pa.field(name, flat.type), flat
    element = pa.field("element", flat.type, nullable=False)
    array = pa.FixedSizeListArray.from_arrays(flat, type=pa.list_(element, int(np.prod(stacked.shape[1:]))))
    return pa.field(name, array.type, metadata={SHAPE_KEY: json.dumps(stacked.shape[1:])}), array
