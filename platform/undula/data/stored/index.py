"""Indexing of existing Parquet files: it lists them once, reads their footers many at a time, and writes the manifest."""

import logging
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256

import pyarrow as pa

from undula.data.stored.listing import Listing, list_data
from undula.data.stored.manifest import (
    Column,
    Manifest,
    ManifestFile,
    column_of,
    difference,
    load_manifest,
    write_manifest,
)
from undula.data.stored.shards import TAIL_BYTES, Shard, intact, parse_footer, read_footer
from undula.errors import ManifestError, StorageError
from undula.storage import Entry, Store, open_store

PARALLEL_FOOTERS = 32
"""Number of footers that are read at the same time."""
FOOTERS_AHEAD = 4 * PARALLEL_FOOTERS
"""Maximum number of footers that are read or wait to be read before the first of them is taken."""


def index(
    url: str,
    advance: Callable[[int], None] = lambda files: None,
    out: str | None = None,
    anonymous: bool = False,
) -> Manifest:
    """Write the manifest of the Parquet files below `url`; see `listing` for what is data.

    Args:
        url: Folder with Parquet files of one schema.
        advance: Progress callback, called with 1 after each file.
        out: URL to write the manifest to, under which the data set is then loaded; by default the manifest is written beside the files.
        anonymous: Whether to read S3 without credentials, both now and whenever the data set is read.

    Returns:
        The manifest.

    Raises:
        ManifestError: The files cannot be indexed as one data set.
    """
    return index_files(list_to_index(url, out, anonymous), advance, out)


def list_to_index(url: str, out: str | None, anonymous: bool) -> Listing:
    """List the files that `index` would index with the same arguments.

    Raises:
        ManifestError: There are none, or the manifest could not be written.
    """
    if anonymous and out is None:
        raise ManifestError(f"{url} is read without credentials, so the manifest cannot be written there; set --out")
    return list_data(open_store(url, anonymous))


def index_files(listing: Listing, advance: Callable[[int], None], out: str | None = None) -> Manifest:
    """Write the manifest of listed files. The arguments and the result are those of `index`."""
    store, first = listing.store, listing.files[0].name
    files: list[ManifestFile] = []
    seen: _Footer | None = None
    with closing(_footers(listing)) as footers:
        for footer in footers:
            if seen and (footer.columns != seen.columns or not footer.schema.equals(seen.schema)):
                raise ManifestError(
                    f"{store.url}/{footer.file.name} has another schema than {first}: {_difference(footer, seen)}; write all "
                    "files of a data set with one schema"
                )
            seen = footer
            files.append(footer.file)
            advance(1)
    assert seen is not None  # a listing has at least one file
    home = open_store(out) if out else store
    is_beside = home == store
    # A manifest elsewhere must not depend on the working directory, so it has the absolute path of the data.
    url, place = (store.url, _place_of(store)) if is_beside else (_place_of(store), "")
    manifest = Manifest(url, tuple(files), seen.columns, store.anonymous, place)
    write_manifest(home, manifest, is_beside)
    return manifest


def renew_copy(url: str) -> None:
    """Update the manifest of a copied data set, whose files have other modification times or ETags than the manifest says.

    Files are copies if they are at another place than the indexed ones, and have their names, sizes and footers. Otherwise nothing is done.

    Raises:
        ManifestError: The manifest cannot be written, or a file is not intact.
    """
    manifest, home = load_manifest(url), open_store(url)
    if manifest.indexed_at in ("", _place_of(home)):
        return
    present = home.find([file.name for file in manifest.files])
    entries = [present.get(file.name) for file in manifest.files]
    pairs = [(entry, file) for entry, file in zip(entries, manifest.files, strict=True) if entry]
    if len(pairs) < len(entries) or any(entry.bytes != file.bytes for entry, file in pairs):
        return
    if all(entry.version == file.version for entry, file in pairs):
        return
    with closing(_footers(Listing(home, tuple(entry for entry, _ in pairs), 0))) as footers:
        files = tuple(footer.file for footer in footers)
    copy = replace(manifest, files=files, indexed_at=_place_of(home))
    if copy.digest != manifest.digest:
        return
    try:
        write_manifest(home, copy, is_beside=True)
    except StorageError as error:
        raise ManifestError(
            f"{url} is a copy of {manifest.indexed_at}, and its manifest needs the versions of the copied files, but {error}; run "
            f"`undula data index {url} --out FOLDER`, and use FOLDER as the URL of the data"
        ) from error
    message = "%s is a copy of %s; its manifest has the modification times or ETags of the copied files now"
    logging.getLogger("undula").warning(message, url, manifest.indexed_at)


def _place_of(store: Store) -> str:
    """Return the URL of a store, as an absolute path on a disk."""
    return store.url if store.is_s3 else store.path()


@dataclass(frozen=True)
class _Footer:
    """What the footer of a file says."""

    file: ManifestFile
    schema: pa.Schema
    columns: tuple[Column, ...]


def _difference(own: "_Footer", first: "_Footer") -> str:
    """Return the first difference between the schema of a file and that of the first file."""
    if text := difference(own.columns, first.columns):
        return text
    here, there = next(pair for pair in zip(own.schema, first.schema, strict=True) if pair[0] != pair[1])
    if here.type != there.type:
        return f"column {here.name!r} is {here.type} and not {there.type}"
    return f"column {here.name!r} may {'' if here.nullable else 'not '}be null"


def _footers(listing: Listing) -> Generator[_Footer, None, None]:
    """Read the footers of all files at the same time, and yield them in the order of the files."""
    pool = ThreadPoolExecutor(PARALLEL_FOOTERS, thread_name_prefix="undula-index")
    ahead: deque[Future[_Footer]] = deque()
    try:
        for entry in listing.files:
            if len(ahead) == FOOTERS_AHEAD:
                yield ahead.popleft().result()
            ahead.append(pool.submit(_footer, listing.store, entry))
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, the other files are not of interest


def _footer(store: Store, entry: Entry) -> _Footer:
    where = f"{store.url}/{entry.name}"
    data = read_footer(Shard(store, entry.name, entry.bytes, entry.version))
    metadata = parse_footer(data, where)
    with intact(where):
        schema = metadata.schema.to_arrow_schema()
    columns = tuple(column_of(field, where) for field in schema)
    if len(set(schema.names)) < len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise ManifestError(f"{where} has two columns named {twice!r}; rename one of them")
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    file = ManifestFile(
        name=entry.name,
        bytes=entry.bytes,
        version=entry.version,
        row_groups=tuple(group.num_rows for group in groups),
        row_group_bytes=tuple(group.total_byte_size for group in groups),
        footer_sha256=sha256(data[:-TAIL_BYTES]).hexdigest(),
    )
    return _Footer(file, schema, columns)
