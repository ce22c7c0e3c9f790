"""The manifest: index of a data set of sharded Parquet. It is written last, so a data set is either complete or does not exist.

The manifest holds everything that a plan and a reader need to know without opening a shard: files, row groups, rows, bytes, a version of
each file, columns, and a digest of all of it. The digest covers names, sizes and Parquet footers, which contain the offsets, sizes and
statistics of every column chunk. It does not cover modification times, so copies of a data set have the same digest.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from undula.errors import ManifestError, StorageError
from undula.storage import Store, open_store

MANIFEST_NAME = "_manifest.json"
"""Name of the manifest beside the files. pandas, pyarrow, Polars and Spark read files whose names begin otherwise as data."""
FORMER_NAME = "manifest.json"
"""Name of the manifest in data sets that older versions have indexed."""
FORMAT = 1
ID_COLUMN = "__id"
"""Column that a read task adds: the sample's id, which is its row number in the data set."""
SHAPE_KEY = b"shape"
"""Key of the field metadata that has the shape of one sample's array as JSON, for a fixed-size list."""

TEXT_TYPES = frozenset({"string", "large_string", "binary", "large_binary"})
"""Arrow types that batches hold as lists of str or bytes."""
NUMBER_TYPES = frozenset(
    {"bool", "halffloat", "float", "double", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
)
"""Arrow types that batches hold as tensors."""


@dataclass(frozen=True)
class ManifestFile:
    """One shard of a data set."""

    name: str
    bytes: int
    version: str
    """Version of the file: the ETag on S3, the size and modification time on a disk."""
    row_groups: tuple[int, ...]
    """Number of rows of each row group."""
    row_group_bytes: tuple[int, ...]
    """Uncompressed size of each row group in bytes."""
    footer_sha256: str


@dataclass(frozen=True)
class Column:
    """One column of a data set."""

    name: str
    type: str
    """Arrow type of the values, as text."""
    shape: tuple[int, ...]
    """Shape of one sample's array; empty for a scalar."""

    def __str__(self) -> str:
        return f"{self.type} {list(self.shape)}" if self.shape else self.type

    def values(self, array: pa.Array) -> pa.Array:
        """Return the values of some rows of the column, in one dimension if a sample is an array.

        Raises:
            ManifestError: There are nulls. NumPy would turn integers with nulls into floats, and would leave out lists that are null.
        """
        values = array if array.null_count or not self.shape else array.flatten()
        if values.null_count:
            raise ManifestError(
                f"column {self.name!r} has nulls, which tensors cannot hold; replace them or leave the column out of data.columns"
            )
        return values

    def numbers(self, array: pa.Array) -> NDArray[Any]:
        """Return some rows of a column of numbers; shape [rows, *sample shape]. Only Booleans are copied: Arrow stores them as bits.

        Raises:
            ManifestError: There are nulls.
        """
        values: NDArray[Any] = self.values(array).to_numpy(zero_copy_only=False)
        return values.reshape(-1, *self.shape)


@dataclass(frozen=True)
class Manifest:
    """Index of the data set at `url`."""

    url: str
    files: tuple[ManifestFile, ...]
    columns: tuple[Column, ...]
    anonymous: bool = False
    """Whether the files are read without credentials."""
    indexed_at: str = ""
    """Place at which the files had these versions; a copy elsewhere has others. Empty if unknown, or if the manifest is not beside them."""

    @property
    def store(self) -> Store:
        return Store(self.url, self.anonymous)

    @cached_property
    def row_counts(self) -> NDArray[np.int64]:
        """Number of rows of each row group of the data set, ordered by file; shape [row groups]."""
        return np.array([rows for file in self.files for rows in file.row_groups], dtype=np.int64)

    @cached_property
    def first_ids(self) -> NDArray[np.int64]:
        """Id of the first row of each row group, and the total number of rows; shape [row groups + 1]. Ids count rows over all files."""
        return np.concatenate(([0], np.cumsum(self.row_counts)))

    @cached_property
    def row_group_places(self) -> tuple[tuple[int, int], ...]:
        """Pair (index of the file, index of the row group in the file) for each row group of the data set."""
        return tuple((number, group) for number, file in enumerate(self.files) for group in range(len(file.row_groups)))

    @property
    def num_rows(self) -> int:
        return int(self.row_counts.sum())

    @property
    def num_bytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.bytes for file in self.files)

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of the files and columns, in hexadecimal."""
        identity = {
            "files": [[file.name, file.bytes, file.row_groups, file.footer_sha256] for file in self.files],
            "columns": [asdict(column) for column in self.columns],
        }
        return sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def select(self, columns: Sequence[str] | None) -> tuple[Column, ...]:
        """Return the named columns, or all columns.

        Raises:
            ManifestError: A column does not exist or has a type that batches do not support.
        """
        by_name = {column.name: column for column in self.columns}
        for name in columns or ():
            if name not in by_name:
                raise ManifestError(
                    f"data.columns names {name!r}, which {self.url} does not have; its columns are {', '.join(by_name)}"
                )
        selected = tuple(by_name[name] for name in columns) if columns else self.columns
        for column in selected:
            if column.type not in NUMBER_TYPES | TEXT_TYPES or (column.shape and column.type in TEXT_TYPES):
                raise ManifestError(
                    f"column {column.name!r} of {self.url} has type {column.type}, which batches do not support; leave it out of "
                    "data.columns, or write it as numbers, fixed-size lists of numbers, strings or bytes"
                )
        return selected

    def check_files(self) -> None:
        """Compare every shard with the files at the URL.

        Raises:
            ManifestError: A shard is missing or has changed.
        """
        present = self.store.find([file.name for file in self.files])
        for file in self.files:
            entry = present.get(file.name)
            if entry is None:
                raise ManifestError(
                    f"{self.url}/{file.name} is in the manifest but does not exist; restore it or run `undula data index {self.url}`"
                )
            if entry.bytes != file.bytes or entry.version != file.version:
                raise ManifestError(
                    f"{self.url}/{file.name} has changed since it was indexed (from {file.bytes} bytes, {file.version}, to "
                    f"{entry.bytes} bytes, {entry.version}); restore it or run `undula data index {self.url}`"
                )

    def to_json(self, is_beside: bool) -> str:
        """Return the content of the manifest file. A manifest that is not beside the data includes the URL of the data."""
        body: dict[str, object] = {
            "format": FORMAT,
            "digest": self.digest,
            "rows": self.num_rows,
            "bytes": self.num_bytes,
            "columns": [asdict(column) for column in self.columns],
            "files": [asdict(file) for file in self.files],
        }
        if is_beside:
            body["indexed_at"] = self.indexed_at
        else:
            body["data"] = {"url": self.url, "anonymous": self.anonymous}
        return json.dumps(body, indent=1) + "\n"


def difference(own: Sequence[Column], first: Sequence[Column]) -> str | None:
    """Return the first difference between two lists of columns, as in "column 'x' is int64 and not float"; None if there is none."""
    here, there = ({column.name: column for column in columns} for columns in (own, first))
    for name in dict.fromkeys([*there, *here]):
        if name not in here:
            return f"it has no column {name!r}"
        if name not in there:
            return f"it also has a column {name!r}"
        if here[name] != there[name]:
            return f"column {name!r} is {here[name]} and not {there[name]}"
    return None if list(here) == list(there) else f"it has the columns in the order {', '.join(here)}"


def load_manifest(url: str) -> Manifest:
    """Read the manifest of the data set at `url`.

    Raises:
        ManifestError: The manifest does not exist or cannot be read.
    """
    store = open_store(url)
    name = next((name for name in (MANIFEST_NAME, FORMER_NAME) if store.exists(name)), None)
    if name is None and not store.exists():
        raise ManifestError(f"there is no folder {url}; correct the path, or create the data set with `undula data`")
    if name is None:
        raise ManifestError(
            f"{url} has no {MANIFEST_NAME}; create the data set with `undula data` or index it with `undula data index {url}`"
        )
    return _parsed(url, store.url, name, store.read(name))


def write_manifest(home: Store, manifest: Manifest, is_beside: bool) -> None:
    """Write the manifest of a data set to a folder, in place of one that an older version has written there."""
    home.write(MANIFEST_NAME, manifest.to_json(is_beside).encode())
    try:
        is_own = "row_groups" in json.loads(home.read(FORMER_NAME))["files"][0]
    except (StorageError, ValueError, LookupError, TypeError):
        return
    if is_own:
        home.delete(FORMER_NAME)


@lru_cache(maxsize=8)  # a process loads its manifests several times, and a large one takes seconds
def _parsed(url: str, store_url: str, name: str, content: bytes) -> Manifest:
    try:
        body = json.loads(content)
        if body["format"] != FORMAT:
            raise ManifestError(
                f"{url}/{name} has format {body['format']}, but this version of Undula reads format {FORMAT}; "
                f"run `undula data index {url}`"
            )
        data = body.get("data", {"url": store_url, "anonymous": False})
        manifest = Manifest(
            url=data["url"],
            files=tuple(
                ManifestFile(
                    **{
                        **file,
                        "row_groups": tuple(file["row_groups"]),
                        "row_group_bytes": tuple(file["row_group_bytes"]),
                    }
                )
                for file in body["files"]
            ),
            columns=tuple(Column(column["name"], column["type"], tuple(column["shape"])) for column in body["columns"]),
            anonymous=data["anonymous"],
            indexed_at=body.get("indexed_at", ""),
        )
        digest = body["digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{url}/{name} is not a manifest ({error!r}); run `undula data index {url}`") from error
    if manifest.digest != digest:
        raise ManifestError(f"{url}/{name} does not match its own digest; run `undula data index {url}`")
    return manifest


def column_of(field: pa.Field, where: str) -> Column:
    """Return the column of an Arrow field.

    Args:
        field: The Arrow field.
        where: Source of the field, for messages.

    Raises:
        ManifestError: Batches do not support the field.
    """
    if field.name == ID_COLUMN:
        raise ManifestError(f"{where}: the column name {ID_COLUMN} is reserved for sample ids; rename the column")
    if not pa.types.is_fixed_size_list(field.type):
        return Column(field.name, str(field.type), ())
    text = (field.metadata or {}).get(SHAPE_KEY)
    try:
        shape = (field.type.list_size,) if text is None else tuple(int(size) for size in json.loads(text))
    except (ValueError, TypeError):
        shape = ()
    if prod(shape) != field.type.list_size or not shape:
        raise ManifestError(
            f"{where}: column {field.name} has the shape {text!r}, which does not match its "
            f"{field.type.list_size} values; write the shape into the field's metadata as JSON, such as [3, 32, 32]"
        )
    return Column(field.name, str(field.type.value_type), shape)
