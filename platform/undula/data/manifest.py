"""The manifest: the index of a data set of sharded Parquet, written last, so that a data set is whole or not there.

It holds what a plan and a reader need without opening a shard: files, row groups, rows, bytes, a version of each file, columns,
and a digest of it all. The digest covers names, sizes and Parquet footers (so offsets, sizes and statistics of every column
chunk), not modification times: the same files have the same digest wherever they lie.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from math import prod

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from undula.errors import ManifestError, StorageError
from undula.storage import Store, open_store

MANIFEST_NAME = "manifest.json"
FORMAT = 1
ID_COLUMN = "__id"
"""Column that a read task adds: the sample's id, its row number in the whole data set."""
SHAPE_KEY = b"shape"
"""Field metadata of a fixed-size list: the shape of one sample's array, as JSON."""

TEXT_TYPES = frozenset({"string", "large_string", "binary", "large_binary"})
"""Arrow types that come as lists of str or bytes."""
NUMBER_TYPES = frozenset(
    {"bool", "halffloat", "float", "double", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
)
"""Arrow types that come as tensors."""

_TAIL_BYTES = 8  # of a Parquet file: the footer's length, and a magic number


@dataclass(frozen=True)
class ManifestFile:
    """A shard."""

    name: str
    bytes: int
    version: str
    """ETag on S3, size and modification time on a disk."""
    row_groups: tuple[int, ...]
    """Rows of each row group."""
    row_group_bytes: tuple[int, ...]
    """Uncompressed bytes of each row group."""
    footer_sha256: str


@dataclass(frozen=True)
class Column:
    """A column: Arrow type as text, and the shape of one sample's array (empty for a scalar)."""

    name: str
    type: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The index of the data set at `url`."""

    url: str
    files: tuple[ManifestFile, ...]
    columns: tuple[Column, ...]
    anonymous: bool = False
    """The files are read without credentials."""

    @property
    def store(self) -> Store:
        return Store(self.url, self.anonymous)

    @cached_property
    def row_counts(self) -> NDArray[np.int64]:
        """Rows of each row group of the data set, file after file; shape [row groups]."""
        return np.array([rows for file in self.files for rows in file.row_groups], dtype=np.int64)

    @cached_property
    def first_ids(self) -> NDArray[np.int64]:
        """Id of the first row of each row group, and the number of rows; shape [row groups + 1]. Ids count rows over all files."""
        return np.concatenate(([0], np.cumsum(self.row_counts)))

    @cached_property
    def row_group_places(self) -> tuple[tuple[int, int], ...]:
        """(file, row group within the file) of each row group of the data set."""
        return tuple((number, group) for number, file in enumerate(self.files) for group in range(len(file.row_groups)))

    @property
    def num_rows(self) -> int:
        return int(self.row_counts.sum())

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @cached_property
    def digest(self) -> str:
        identity = {
            "files": [[file.name, file.bytes, file.row_groups, file.footer_sha256] for file in self.files],
            "columns": [asdict(column) for column in self.columns],
        }
        return sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def select(self, columns: Sequence[str] | None) -> tuple[Column, ...]:
        """The named columns, or all; ManifestError names one that is not there, or that no batch can hold."""
        by_name = {column.name: column for column in self.columns}
        for name in columns or ():
            if name not in by_name:
                raise ManifestError(
                    f"data.columns names {name!r}, which {self.url} does not have: it has {', '.join(by_name)}"
                )
        selected = tuple(by_name[name] for name in columns) if columns else self.columns
        for column in selected:
            if column.type not in NUMBER_TYPES | TEXT_TYPES or (column.shape and column.type in TEXT_TYPES):
                raise ManifestError(
                    f"column {column.name!r} of {self.url} is {column.type}, which no batch holds: leave it out of data.columns, "
                    "or write it as numbers, fixed-size lists of numbers, strings or bytes"
                )
        return selected

    def check_files(self) -> None:
        """Compare every shard with what is at the URL now; ManifestError names the first that differs."""
        present = {entry.name: entry for entry in self.store.list()}
        for file in self.files:
            entry = present.get(file.name)
            if entry is None:
                raise ManifestError(
                    f"{self.url}/{file.name} is gone, and the manifest lists it: restore it or index again"
                )
            if entry.bytes != file.bytes or entry.version != file.version:
                raise ManifestError(
                    f"{self.url}/{file.name} has changed since the manifest was made (was {file.bytes} bytes, {file.version}; "
                    f"is {entry.bytes} bytes, {entry.version}): restore it, or run `undula data index {self.url}`"
                )

    def to_json(self, is_beside: bool) -> str:
        """The manifest's file; one that does not lie beside the data says where they are."""
        body: dict[str, object] = {
            "format": FORMAT,
            "digest": self.digest,
            "rows": self.num_rows,
            "bytes": self.num_bytes,
            "columns": [asdict(column) for column in self.columns],
            "files": [asdict(file) for file in self.files],
        }
        if not is_beside:
            body["data"] = {"url": self.url, "anonymous": self.anonymous}
        return json.dumps(body, indent=1) + "\n"


def load_manifest(url: str) -> Manifest:
    """The manifest of the data set at `url`; ManifestError where there is none, or it is not one that we can read."""
    store = open_store(url)
    if not store.exists(MANIFEST_NAME):
        raise ManifestError(
            f"{url} has no {MANIFEST_NAME}: make the data set with `undula data`, or index it with `undula data index {url}`"
        )
    try:
        body = json.loads(store.read(MANIFEST_NAME))
        if body["format"] != FORMAT:
            raise ManifestError(
                f"{url}/{MANIFEST_NAME} has format {body['format']}, this version reads {FORMAT}: index again"
            )
        data = body.get("data", {"url": store.url, "anonymous": False})
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
        )
        digest = body["digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(
            f"{url}/{MANIFEST_NAME} is not a manifest ({error!r}): index again with `undula data index {url}`"
        ) from error
    if manifest.digest != digest:
        raise ManifestError(
            f"{url}/{MANIFEST_NAME} does not match its own digest: index again with `undula data index {url}`"
        )
    return manifest


def index(
    url: str,
    advance: Callable[[int], None] = lambda files: None,
    out: str | None = None,
    anonymous: bool = False,
) -> Manifest:
    """Read the footers of all Parquet files below `url` and write the manifest.

    Args:
        url: folder with Parquet files of one schema.
        advance: called with 1 after each file, for a progress bar.
        out: where the manifest goes, and by what name the data set is then known; by default beside the files.
        anonymous: read S3 without credentials, now and whenever the data set is read.
    """
    if anonymous and out is None:
        raise ManifestError(
            f"{url} is to be read without credentials, so nothing can be written there: say where with --out"
        )
    store = open_store(url, anonymous)
    entries = [entry for entry in store.list() if entry.name.endswith(".parquet")]
    if not entries:
        raise ManifestError(f"{url} holds no .parquet file: nothing to index")
    files: list[ManifestFile] = []
    schema: pa.Schema | None = None
    columns: tuple[Column, ...] = ()
    for entry in entries:
        metadata, footer_sha256 = _read_footer(store, entry.name)
        arrow_schema = metadata.schema.to_arrow_schema()
        file_columns = tuple(column_of(field, f"{store.url}/{entry.name}") for field in arrow_schema)
        if files and (file_columns != columns or not arrow_schema.equals(schema)):
            raise ManifestError(
                f"{url}/{entry.name} has another schema than {entries[0].name}: a data set has one schema"
            )
        schema, columns = arrow_schema, file_columns
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        files.append(
            ManifestFile(
                name=entry.name,
                bytes=entry.bytes,
                version=entry.version,
                row_groups=tuple(group.num_rows for group in groups),
                row_group_bytes=tuple(group.total_byte_size for group in groups),
                footer_sha256=footer_sha256,
            )
        )
        advance(1)
    home = open_store(out) if out else store
    # A manifest that lies elsewhere is read from anywhere.
    url = store.url if home == store or store.is_s3 else store.path()
    manifest = Manifest(url, tuple(files), columns, anonymous)
    home.write(MANIFEST_NAME, manifest.to_json(is_beside=home == store).encode())
    return manifest


def _read_footer(store: Store, name: str) -> tuple[pq.FileMetaData, str]:
    with store.open(name) as file:
        try:
            size = file.size()
            file.seek(max(size - _TAIL_BYTES, 0))
            tail = file.read(_TAIL_BYTES)
            length = min(int.from_bytes(tail[:4], "little"), max(size - _TAIL_BYTES, 0))
            file.seek(max(size - _TAIL_BYTES - length, 0))
            footer = file.read(length)
        except OSError as error:
            raise StorageError(f"cannot read {store.url}/{name}: {error}") from error
    try:
        return pq.read_metadata(pa.BufferReader(footer + tail)), sha256(footer).hexdigest()
    except (pa.ArrowInvalid, OSError) as error:
        detail = " ".join(str(error).split())
        raise ManifestError(f"{store.url}/{name} is not a whole Parquet file: {detail}") from error


def column_of(field: pa.Field, where: str) -> Column:
    """The column of an Arrow field; ManifestError, which says where, when no batch can hold it."""
    if field.name == ID_COLUMN:
        raise ManifestError(f"{where}: column {ID_COLUMN} has the name under which samples get their ids: rename it")
    if not pa.types.is_fixed_size_list(field.type):
        return Column(field.name, str(field.type), ())
    text = (field.metadata or {}).get(SHAPE_KEY)
    try:
        shape = (field.type.list_size,) if text is None else tuple(int(size) for size in json.loads(text))
    except (ValueError, TypeError):
        shape = ()
    if prod(shape) != field.type.list_size or not shape:
        raise ManifestError(
            f"{where}: column {field.name} has the shape {text!r}, which does not hold its "
            f"{field.type.list_size} values: write the field's metadata as JSON, such as [3, 32, 32]"
        )
    return Column(field.name, str(field.type.value_type), shape)
