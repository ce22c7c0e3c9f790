"""What is data below a URL: the Parquet files, but not hidden ones. Tables with a log of their own are refused."""

from dataclasses import dataclass

from undula.errors import ManifestError
from undula.storage import Entry, Store

HIDDEN = ("_", ".")
"""Prefixes of the names of files and folders that are not data. `pyarrow.dataset` and Spark skip them too."""
PARQUET = (".parquet", ".parq", ".pq", ".parquet.gzip", ".parquet.gz", ".parquet.snappy", ".parquet.zst")
"""Endings of the names of Parquet files, in any case. The last ones name the compression of the columns, as many use with pandas."""


@dataclass(frozen=True)
class Listing:
    """Data files below a URL."""

    store: Store
    files: tuple[Entry, ...]
    """Parquet files, sorted by name."""
    num_hidden: int
    """Number of Parquet files that are left out because a part of their names begins with `_` or `.`."""


def list_data(store: Store) -> Listing:
    """List the data files below a URL.

    Raises:
        ManifestError: There are none, or the folder is a Delta, Iceberg or Hudi table.
    """
    entries = store.list()
    refuse_tables(store.url, entries)
    parquet = [entry for entry in entries if entry.name.lower().endswith(PARQUET)]
    files = tuple(entry for entry in parquet if not is_hidden(entry.name))
    if not files:
        hidden = f" except {len(parquet)} whose names, or those of their folders, begin with _ or ." if parquet else ""
        raise ManifestError(
            f"{store.url} has no Parquet files to index{hidden}; their names end with {', '.join(PARQUET)}"
        )
    return Listing(store, files, len(parquet) - len(files))


def is_hidden(name: str) -> bool:
    """Return whether a part of a name that is relative to the URL begins with `_` or `.`."""
    return any(part.startswith(HIDDEN) for part in name.split("/"))


def refuse_tables(url: str, entries: list[Entry]) -> None:
    """Refuse Delta, Iceberg and Hudi tables: their logs say which of their files belong to the current version, and the folders do not.

    Raises:
        ManifestError: There is such a table below the URL.
    """
    for entry in entries:
        if table := _table(entry.name):
            folder, kind, log = table
            raise ManifestError(
                f"{url}/{folder}".rstrip("/") + f" is {kind} table (it has {log}), whose folder can also hold files of "
                "earlier versions and deleted rows; write the table's current version as Parquet files to another "
                "folder with a tool that reads its log, such as Spark, and use that folder"
            )


def _table(name: str) -> tuple[str, str, str] | None:
    """Return (folder of the table, its kind, name of its log) if a file belongs to the log of a table."""
    parts = name.split("/")
    for place, part in enumerate(parts[:-1]):
        folder = "/".join(parts[:place])
        if is_hidden(folder):
            return None
        if part == "_delta_log":
            return folder, "a Delta", "_delta_log/"
        if part == ".hoodie":
            return folder, "a Hudi", ".hoodie/"
        if part == "metadata" and place == len(parts) - 2 and parts[-1].endswith(".metadata.json"):
            return folder, "an Iceberg", f"metadata/{parts[-1]}"
    return None
