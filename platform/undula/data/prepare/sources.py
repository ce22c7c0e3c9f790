"""Sources of `undula data convert`: which files below a URL are data, and their rows as tables of columns that batches support."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from undula.data.prepare.convert import converted, target_schema
from undula.data.prepare.formats import Opener, TableFiles, open_arrow, open_parquet
from undula.data.prepare.text_files import open_csv, open_json
from undula.data.prepare.webdataset import samples_in_tables
from undula.data.stored.listing import PARQUET, is_hidden, refuse_tables
from undula.errors import ManifestError
from undula.storage import Entry, Store, open_store

STATE, INFO, SPLITS = _SAVED = "state.json", "dataset_info.json", "dataset_dict.json"
"""Files of `datasets.save_to_disk`: the names of a Dataset's data files, its description, and the splits of a DatasetDict."""
_INDICES = ("_indices_files", "_indices_data_files")
"""Keys of old state files that name a file with the numbers of the rows, which the data set has in that order."""

_PACKED = ("", ".gz", ".bz2", ".zst")
_ENDINGS = {
    "Parquet": PARQUET,
    "Arrow": (".arrow",),
    "tar": (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"),
    "CSV": tuple(f".csv{packed}" for packed in _PACKED),
    "JSON lines": tuple(f"{ending}{packed}" for ending in (".jsonl", ".ndjson") for packed in _PACKED),
    "JSON": tuple(f".json{packed}" for packed in _PACKED),
}
"""Endings of the files of each format. Files of JSON are data only if there are no others, because many tools write some beside data."""
_BINARY = ("Parquet", "Arrow", "tar")
"""Formats in which an empty file is a damaged one. Other empty files have no rows."""
_OPENERS: dict[str, Opener] = {
    "Parquet": open_parquet,
    "Arrow": open_arrow,
    "CSV": open_csv,
    "JSON lines": open_json,
    "JSON": open_json,
}


@dataclass(frozen=True)
class Source:
    """Rows of a source in any format. Each call of `tables` iterates over all rows again."""

    num_rows: int
    schema: pa.Schema
    tables: Callable[[], Iterator[pa.Table]]


def open_source(url: str, columns: Sequence[str] | None = None) -> Source:
    """Open a path or s3:// URL: Parquet, CSV or JSON lines files, WebDataset tars, or a folder written by `datasets.save_to_disk`.

    Lists of equal length become fixed-size lists. A struct with a field `bytes`, as `datasets` uses for images, becomes the bytes.

    Args:
        url: URL of a file or a folder.
        columns: Columns to keep; None for all.

    Raises:
        ManifestError: The URL has no files of a known format or files that do not belong together, or a column has a type that batches do
            not support.
    """
    if columns and (twice := next((name for name in columns if columns.count(name) > 1), None)):
        raise ManifestError(f"--columns names {twice!r} twice; name each column once")
    store, entries = _listed(url)
    raw = _raw_tables(url, store, entries, tuple(columns) if columns else None)
    first = next(raw(), None)
    if first is None:
        raise ManifestError(f"{url} has no rows to convert")
    if columns and (missing := [name for name in columns if name not in first.column_names]):
        raise ManifestError(f"{url} has no column {missing[0]!r}; its columns are {', '.join(first.column_names)}")
    schema = target_schema(first.select(columns) if columns else first, url)

    def tables() -> Iterator[pa.Table]:
        done = 0
        for table in raw():
            yield converted(table, schema, url, done)
            done += table.num_rows

    return Source(sum(table.num_rows for table in raw()), schema, tables)


def _listed(url: str) -> tuple[Store, list[Entry]]:
    """Return the folder and its files, without hidden ones; for the URL of a file, its folder and the file."""
    store = open_store(url)
    if entries := store.list():
        refuse_tables(store.url, entries)
        return store, [entry for entry in entries if not is_hidden(entry.name)]
    folder, _, name = store.path().rpartition("/")
    parent = open_store(f"s3://{folder}" if store.is_s3 else folder or "/")
    if not parent.exists(name):
        raise ManifestError(f"{url} does not exist; give the path or s3:// URL of a file or a folder")
    return parent, [Entry(name, 1, "")]


def _raw_tables(
    url: str, store: Store, entries: list[Entry], columns: tuple[str, ...] | None
) -> Callable[[], Iterator[pa.Table]]:
    kind, names = _data_files(url, store, entries)
    if kind == "tar":
        return lambda: samples_in_tables(store, names)
    files = TableFiles(store, names, _OPENERS[kind], columns)
    return files.tables


def _data_files(url: str, store: Store, entries: list[Entry]) -> tuple[str, tuple[str, ...]]:
    """Return the format of the data below a URL and the names of the data files, in order."""
    saved = _saved_folders([entry.name for entry in entries])
    if saved:
        return "Arrow", _saved_files(store, saved)
    files = {
        kind: tuple(
            entry.name for entry in entries if entry.name.lower().endswith(endings) and (entry.bytes or kind in _BINARY)
        )
        for kind, endings in _ENDINGS.items()
    }
    kinds = [kind for kind in files if files[kind]]
    kinds = [kind for kind in kinds if kind != "JSON"] or kinds
    if not kinds:
        known = ", ".join(f"*{ending}" for endings in _ENDINGS.values() for ending in endings)
        raise ManifestError(f"{url} has no files to convert; supported files are {known}")
    if len(kinds) > 1:
        raise ManifestError(
            f"{store.url} has files of several formats, such as {files[kinds[0]][0]} and {files[kinds[1]][0]}; convert "
            "each format from a folder of its own"
        )
    if kinds == ["Arrow"] and _is_cache([entry.name for entry in entries]):
        raise ManifestError(
            f"{store.url} is a cache of the datasets library, whose files can be those of several splits and of "
            "intermediate results; load the data set with the library, write it with save_to_disk and convert that folder"
        )
    return kinds[0], files[kinds[0]]


def _saved_folders(names: Sequence[str]) -> list[str]:
    """Return the folders that `datasets.save_to_disk` wrote, relative to the URL."""
    folders = {file: {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] == file} for file in _SAVED}
    return sorted(folders[SPLITS] | (folders[STATE] & folders[INFO]))


def _is_cache(names: Sequence[str]) -> bool:
    files = [name.rpartition("/")[2] for name in names]
    arrow = [file for file in files if file.endswith(".arrow")]
    return any(file.startswith("cache-") for file in arrow) or (INFO in files and len(arrow) > 1)


def _saved_files(store: Store, folders: Sequence[str]) -> tuple[str, ...]:
    """Return the data files of a folder that `datasets.save_to_disk` wrote. Other files, such as the cache of `map`, are not data.

    Raises:
        ManifestError: The folder is a DatasetDict or has several data sets, which must not be mixed.
    """
    if "" not in folders:
        raise ManifestError(
            f"{store.url} has data sets that datasets.save_to_disk wrote in {', '.join(folders)}; convert each of them from its own URL"
        )
    splits = _read_json(store, SPLITS)["splits"] if store.exists(SPLITS) else None
    if splits is not None:
        urls = ", ".join(f"{store.url}/{split}" for split in splits)
        raise ManifestError(
            f"{store.url} is a DatasetDict with the splits {', '.join(splits)}, which a data set must not mix; convert "
            f"each of them from its own URL: {urls}"
        )
    state = _read_json(store, STATE)
    files = state.get("_data_files")
    if not files:
        raise ManifestError(
            f"{store.url}/{STATE} names no data files; write the folder again with datasets.save_to_disk"
        )
    if any(state.get(key) for key in _INDICES) or any(file.get("skip") or "take" in file for file in files):
        raise ManifestError(
            f"an old version of the datasets library wrote {store.url}, and {STATE} selects or reorders the rows of its files; load "
            "it and write it again with a current version, whose save_to_disk writes the rows themselves"
        )
    return tuple(str(file["filename"]).rpartition("/")[2] for file in files)


def _read_json(store: Store, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(store.read(name)))
    except ValueError as error:
        raise ManifestError(f"{store.url}/{name} is not intact JSON: {error}; restore it") from error
