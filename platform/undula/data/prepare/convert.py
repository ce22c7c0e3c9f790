"""Conversion of tables to columns that batches support: numbers, fixed-size lists of numbers, strings and bytes, without nulls."""

from math import prod

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from undula.data.prepare.write import array_field
from undula.data.stored.manifest import NUMBER_TYPES, TEXT_TYPES, column_of
from undula.errors import ManifestError


def target_schema(table: pa.Table, url: str) -> pa.Schema:
    """Return the schema to write for tables like this one."""
    fields = []
    for field in table.schema:
        array = table[field.name].combine_chunks()
        _refuse_nulls(array, field.name, url, 0)
        shape, values = _shape(array)
        if 0 in shape:
            raise ManifestError(
                f"column {field.name!r} of {url} has an empty list in the first row, which is no array; pad the lists to one "
                "length or leave the column out with --columns"
            )
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
        is_fixed = pa.types.is_fixed_size_list(array.type)
        shape.append(array.type.list_size if is_fixed else len(array[0]) if len(array) else 0)
        array = _plain(array.flatten())
    return tuple(shape), array.type


def _plain(array: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    if pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        return pc.struct_field(array, "bytes")
    return array


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def converted(table: pa.Table, schema: pa.Schema, url: str, first_row: int) -> pa.Table:
    arrays = []
    for field in schema:
        array = _plain(table[field.name].combine_chunks())
        _refuse_nulls(array, field.name, url, first_row)
        shape = column_of(field, url).shape
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
