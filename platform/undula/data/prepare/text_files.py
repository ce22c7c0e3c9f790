"""Reading of CSV and JSON files, and of their integers, which Arrow rounds in a column with fractions or with integers of 2^63 or more."""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from json import JSONDecodeError, JSONDecoder
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from undula.errors import ManifestError
from undula.storage import Store

BLOCK_BYTES = 16 * 2**20
"""Bytes of CSV or JSON lines that are parsed at once. The first block decides on the types, and no row can be longer."""
LARGE = 2.0**53
"""Smallest float beside which there are integers that no float holds."""
_INTEGER = r"^\s*[+-]?[0-9]{16,}\s*$"  # shorter ones are less than LARGE


def open_csv(
    store: Store, name: str, columns: Sequence[str] | None, types: pyarrow.csv.ConvertOptions | None = None
) -> pa.RecordBatchReader:
    """Open a CSV file, which may be compressed."""
    options, quoted = pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES), pyarrow.csv.ParseOptions(newlines_in_values=True)
    file = store.filesystem.open_input_stream(store.path(name))
    return pyarrow.csv.open_csv(file, read_options=options, parse_options=quoted, convert_options=types)


def open_json(store: Store, name: str, columns: Sequence[str] | None) -> pa.RecordBatchReader:
    """Open a file of JSON lines, which may be compressed. A field that the first block lacks is an error, as it should be."""
    options = pyarrow.json.ReadOptions(block_size=BLOCK_BYTES)
    return pyarrow.json.open_json(store.filesystem.open_input_stream(store.path(name)), read_options=options)


def exact(
    batches: pa.RecordBatchReader, columns: Iterable[str], integers: Callable[[str], Iterator[Decimal]], where: str
) -> Iterator[pa.RecordBatch]:
    """Yield batches of a file in which no integer was rounded.

    Args:
        batches: Batches of the file.
        columns: Columns to check.
        integers: Function that reads the integers of a column from the file. It is called for columns with large numbers only.
        where: URL of the file, for messages.

    Raises:
        ManifestError: An integer was rounded.
        pa.ArrowInvalid: The file cannot be read. The message names the column in place of its number.
    """
    unchecked, names = set(columns), batches.schema.names
    try:
        for batch in batches:
            for column in sorted(unchecked & set(names)):
                if _has_large_floats(batch.column(column)):
                    unchecked.remove(column)
                    for integer in integers(column):
                        _refuse_rounded(integer, column, where)
            yield batch
    except pa.ArrowInvalid as error:
        named = re.sub(r"CSV column #(\d+)", lambda found: f"CSV column {names[int(found[1])]!r}", str(error))
        raise pa.ArrowInvalid(named) from error


def _has_large_floats(array: pa.Array) -> bool:
    while pa.types.is_list(array.type):
        array = array.flatten()
    return pa.types.is_float64(array.type) and bool((np.abs(array.drop_null().to_numpy()) >= LARGE).any())


def _refuse_rounded(integer: Decimal, column: str, where: str) -> None:
    if Decimal(float(integer)) != integer:
        raise ManifestError(
            f"column {column!r} of {where} has the integer {integer} beside fractions or integers of 2^63 or more, so it would be rounded; "
            "write them as text (in JSON in quotes, in CSV behind a letter), or leave the column out by naming the others with --columns"
        )


def csv_integers(store: Store, name: str, column: str) -> Iterator[Decimal]:
    """Yield the long integers of a column of a CSV file."""
    texts = pyarrow.csv.ConvertOptions(include_columns=[column], column_types={column: pa.string()})
    for batch in open_csv(store, name, None, texts):
        values = batch.column(0)
        for text in values.filter(pc.match_substring_regex(values, _INTEGER)).to_pylist():
            yield Decimal(text.strip())


def json_integers(store: Store, name: str, column: str) -> Iterator[Decimal]:
    """Yield the integers of a column of a file of JSON objects. An object may have several lines, and a line several objects."""
    decoder, text = JSONDecoder(parse_int=Decimal), ""
    for line in io.TextIOWrapper(store.filesystem.open_input_stream(store.path(name)), "utf-8-sig"):
        text += line
        while text := text.lstrip():
            try:
                row, end = decoder.raw_decode(text)
            except JSONDecodeError:
                break
            yield from _decimals(row.get(column))
            text = text[end:]


def _decimals(value: Any) -> Iterator[Decimal]:
    if isinstance(value, Decimal):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _decimals(each)
