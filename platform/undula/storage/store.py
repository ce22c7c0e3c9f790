"""Files below a URL, on a disk or on S3.

Also here: files on a disk. A file is written beside its place and then moved there.
"""

import builtins
import math
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import pyarrow as pa
from pyarrow import fs

from undula.errors import StorageError
from undula.storage.arrow import s3_filesystem
from undula.storage.retries import named_errors
from undula.storage.s3 import require_credentials
from undula.storage.s3_files import S3File
from undula.storage.s3_requests import PART_BYTES, Bucket, Buffers, Object, bare, split_path


def create_file(path: Path, data: bytes) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("xb")
    except FileExistsError:
        return False
    with file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return True


def delete_file(path: Path) -> None:
    def ignore_if_gone(function: object, name: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    if path.is_dir():
        shutil.rmtree(path, onerror=ignore_if_gone)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def replace_file(path: Path, buffers: Sequence[bytes | memoryview]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            for buffer in buffers:
                file.write(buffer)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def files_below(
    folder: Path,
    name: str = "",
    above: frozenset[tuple[int, int]] = frozenset(),
    unreadable: list[str] | None = None,
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and the state of each whole file below a folder. Files and folders may disappear meanwhile.

    Links to files and folders are followed, but not those to a folder that the link lies in, because they have no end.

    Args:
        folder: Path of the folder.
        name: Name of the folder, which the names of its files begin with.
        above: Device and inode of each folder above this one.
        unreadable: List to which the names of inner folders that are not readable are added; None to raise an exception.
    """
    try:
        state = folder.stat()
        with os.scandir(folder) as scanned:
            entries = list(scanned)
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError as error:
        if name and unreadable is not None:
            unreadable.append(name)
            return
        raise PermissionError(f"{folder} is not readable") from error
    if (state.st_dev, state.st_ino) in above:
        return
    for entry in entries:
        inner = f"{name}/{entry.name}" if name else entry.name
        if entry.is_dir():
            yield from files_below(folder / entry.name, inner, above | {(state.st_dev, state.st_ino)}, unreadable)
        elif not entry.name.endswith(".partial") and (state_of := file_state(folder / entry.name)):
            yield inner, state_of


def file_state(path: Path) -> os.stat_result | None:
    """Return the state of a file; None if it does not exist or is not a file."""
    try:
        state = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return state if stat.S_ISREG(state.st_mode) else None


@dataclass(frozen=True)
class Entry:
    """One file of a store."""

    name: str
    """Name of the file, relative to the store."""
    bytes: int
    version: str
    """Version of the file: the ETag on S3, the size and modification time on a disk."""


@dataclass(frozen=True)
class Store:
    """Folder at a URL. Names of files are relative to it and have forward slashes. On S3, they are exact: `x/a` is not `x//a`."""

    url: str
    anonymous: bool = False
    """Whether S3 requests are unsigned, as public buckets allow."""

    def __truediv__(self, name: str) -> "Store":
        return Store(f"{self.url if self.is_s3 else self.url.rstrip('/')}/{name}", self.anonymous)

    @property
    def is_s3(self) -> bool:
        return self.url.startswith("s3://")

    @property
    def filesystem(self) -> fs.FileSystem:
        """Arrow's file system for `path`."""
        return s3_filesystem(self.anonymous) if self.is_s3 else fs.LocalFileSystem()

    def path(self, name: str = "") -> str:
        """Return the path for `filesystem`: `bucket/key` on S3, an absolute path otherwise."""
        if self.is_s3:
            root = self.url.removeprefix("s3://")
            return f"{root}/{name}" if name else root
        root = str(Path(self.url).expanduser().absolute())
        return str(PurePosixPath(root) / name) if name else root

    def on_s3(self, name: str = "") -> tuple[Bucket, str]:
        """Return the bucket and the key of a file on S3."""
        return split_path(self.path(name), self.anonymous)

    def read(self, name: str) -> bytes:
        """Read a whole file. The result is the content of a single write."""
        with named_errors("read", self._url_of(name)):
            if self.is_s3:
                bucket, key = self.on_s3(name)
                return bucket.read(key)
            return Path(self.path(name)).read_bytes()

    def read_chunks(self, name: str, chunk_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Read a whole file as `read` does, without holding all of it in memory."""
        with named_errors("read", self._url_of(name)), self._file(name) as file:
            while chunk := file.read(chunk_bytes):
                yield chunk

    def open(self, name: str) -> pa.NativeFile:
        """Open a seekable file for reading."""
        with named_errors("read", self._url_of(name)):
            if self.is_s3:
                return pa.PythonFile(S3File(*self.on_s3(name)), mode="r")
            return self.filesystem.open_input_file(self.path(name))

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file atomically: a reader sees the previous content or this one, never a part."""
        self.write_buffers(name, (data,))

    def write_buffers(self, name: str, buffers: Buffers) -> None:
        """Write a whole file as `write` does, without joining its pieces in memory."""
        with named_errors("write", self._url_of(name)):
            if self.is_s3:
                bucket, key = self.on_s3(name)
                bucket.write(key, buffers)
            else:
                replace_file(Path(self.path(name)), buffers)

    def create(self, name: str, data: bytes) -> bool:
        """Create a file if it does not exist. Of several writers, one succeeds, on any host.

        On S3 this is a conditional write. If the server does not implement those, or ignores the condition, several writers can succeed.
        On a disk, a reader may see an incomplete file.

        Args:
            name: Name of the file.
            data: Content that no other writer has, so that a request that S3 has carried out but not answered can be repeated.

        Returns:
            Whether this call created the file.
        """
        with named_errors("create", self._url_of(name)):
            if self.is_s3:
                bucket, key = self.on_s3(name)
                return bucket.create(key, data)
            return create_file(Path(self.path(name)), data)

    def delete(self, name: str) -> None:
        """Delete a file or a folder if it exists. Another process may delete it at the same time."""
        with named_errors("delete", self._url_of(name)):
            if not self.is_s3:
                delete_file(Path(self.path(name)))
                return
            bucket, key = self.on_s3(name)
            bucket.delete_below(f"{key}/" if key else "")
            if key:
                bucket.delete(key)

    def exists(self, name: str = "") -> bool:
        """Return whether there is a file or a folder."""
        with named_errors("read", self._url_of(name)):
            if not self.is_s3:
                return Path(self.path(name)).exists()
            bucket, key = self.on_s3(name)
            return bool(key and bucket.head(key)) or bucket.has_any(f"{key}/" if key else "")

    def list(self, prefix: str = "", unreadable: "builtins.list[str] | None" = None) -> list[Entry]:
        """List all files below the folder `prefix`, sorted by name. The list is empty if the folder does not exist.

        Args:
            prefix: Name of the folder.
            unreadable: List to which the names of folders that are not readable are added; None to fail at the first one.
        """
        with named_errors("list", self._url_of(prefix)):
            entries = self._list_s3(prefix) if self.is_s3 else self._list_local(prefix, unreadable)
            return sorted(entries, key=lambda entry: entry.name)

    def find(self, names: Sequence[str]) -> dict[str, Entry]:
        """Return those of the named files that exist, by name. On S3, this takes a request for many names, and several at a time."""
        with named_errors("list", self.url):
            if not self.is_s3:
                states = ((name, file_state(Path(self.path(name)))) for name in names)
                return {name: _local_entry(name, state) for name, state in states if state}
            bucket, root = self.on_s3()
            root = f"{root}/" if root else ""
            objects = bucket.find(sorted(f"{root}{name}" for name in names))
            return {entry.name: entry for entry in (_s3_entry(root, description) for description in objects)}

    def names(self, folder: str) -> set[str]:
        """Return the names of the files in a folder, but not of those in its subfolders. This needs no look at each file."""
        with named_errors("list", self._url_of(folder)):
            if self.is_s3:
                return {entry.name.removeprefix(f"{folder}/") for entry in self._list_s3(folder, is_flat=True)}
            try:
                with os.scandir(self.path(folder)) as entries:
                    return {entry.name for entry in entries if entry.is_file()}
            except FileNotFoundError:
                return set()

    def folders(self, folder: str) -> set[str]:
        """Return the names of the folders in a folder, also of those without files. S3 has no folders."""
        path = Path(self.path(folder))
        with named_errors("list", self._url_of(folder)):
            return (
                set() if self.is_s3 or not path.is_dir() else {entry.name for entry in path.iterdir() if entry.is_dir()}
            )

    @property
    def free_bytes(self) -> float:
        """Free space of the file system, whose folder must exist; infinity on S3."""
        with named_errors("read", self.url):
            return math.inf if self.is_s3 else shutil.disk_usage(self.path()).free

    def check_writable(self) -> None:
        """Check that files can be written to the store.

        Raises:
            StorageError: They cannot be written.
        """
        self.write(".undula-write-test", b"")
        self.delete(".undula-write-test")

    def _file(self, name: str) -> IO[bytes] | S3File:
        return S3File(*self.on_s3(name)) if self.is_s3 else Path(self.path(name)).open("rb")

    def _url_of(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _list_local(self, prefix: str, unreadable: "builtins.list[str] | None") -> Iterator[Entry]:
        for name, state in files_below(Path(self.path(prefix)), prefix, unreadable=unreadable):
            yield _local_entry(name, state)

    def _list_s3(self, prefix: str, is_flat: bool = False) -> Iterator[Entry]:
        bucket, root = self.on_s3()
        root = f"{root}/" if root else ""
        for entry in bucket.list(root + (f"{prefix}/" if prefix else ""), is_flat):
            if not entry.key.endswith("/"):
                yield _s3_entry(root, entry)


def _local_entry(name: str, state: os.stat_result) -> Entry:
    return Entry(name, state.st_size, f"size {state.st_size}, mtime {state.st_mtime_ns}")


def _s3_entry(root: str, source: Object) -> Entry:
    return Entry(source.key.removeprefix(root), source.bytes, f"etag {bare(source.etag)}")


def write_file(url: str, data: bytes) -> None:
    """Write one file at a path or an s3:// URL."""
    folder, slash, name = url.rpartition("/")
    open_store(folder + slash if slash else ".").write(name, data)


def open_store(url: str, anonymous: bool = False) -> Store:
    """Return the store at `url`. This checks the scheme and the presence of S3 credentials but sends no request to S3.

    Raises:
        StorageError: The scheme is not supported, or credentials are missing.
    """
    if url.startswith("s3:") and not url.startswith("s3://"):
        raise StorageError(f"{url!r} is neither a path nor a URL; write s3://{url.removeprefix('s3:').lstrip('/')}")
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in ("", "s3"):
        raise StorageError(f"{url!r} has the scheme {scheme!r}, which is not supported; use a path or an s3:// URL")
    if scheme == "s3":
        if not anonymous:
            require_credentials(url)
        return Store(url.removesuffix("/"), anonymous)
    return Store(str(Path(url).expanduser()))
