"""Files at a URL: a local path or `s3://bucket/prefix`. Every write is atomic.

S3 is configured by the usual AWS variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_REGION, ...), so any S3 endpoint works.
"""

import io
import os
import secrets
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow import fs

from undula.errors import StorageError

DEFAULT_REGION = "us-east-1"
REQUEST_TIMEOUT_S = 20.0
"""Maximum time in seconds without a byte from S3. Arrow's default of 3 s is too short for a busy server."""
PART_BYTES = 16 * 2**20
"""Minimum size of the parts in which a larger file is sent to S3. S3 itself requires 5 MiB."""
MOST_PARTS = 10_000
"""Maximum number of parts of a file on S3."""
_CONFLICT, _EXISTS, _NOT_IMPLEMENTED = 409, 412, 501
"""Statuses with which S3 answers a conditional write."""

Buffers: TypeAlias = Sequence[bytes | memoryview]
"""Content of a file in pieces, one after another. A memoryview must be of bytes."""


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
    """Folder at a URL. Names of files are relative to it and have forward slashes."""

    url: str
    anonymous: bool = False
    """Whether S3 requests are unsigned, as public buckets allow."""

    def __truediv__(self, name: str) -> "Store":
        return Store(f"{self.url.rstrip('/')}/{name}", self.anonymous)

    @property
    def is_s3(self) -> bool:
        return self.url.startswith("s3://")

    @property
    def filesystem(self) -> fs.FileSystem:
        return _s3_filesystem(self.anonymous) if self.is_s3 else fs.LocalFileSystem()

    def path(self, name: str = "") -> str:
        """Return the path for `filesystem`: `bucket/key` on S3, an absolute path otherwise."""
        root = self.url.removeprefix("s3://") if self.is_s3 else str(Path(self.url).expanduser().absolute())
        return str(PurePosixPath(root) / name) if name else root

    def read(self, name: str) -> bytes:
        """Read a whole file. The result is the content of a single write."""
        with self._errors("read", name):
            if self.is_s3:
                # Arrow requests the size and then the bytes, and the file could change in between; this is one request.
                bucket, _, key = self.path(name).partition("/")
                return bytes(s3_client(anonymous=self.anonymous).get_object(Bucket=bucket, Key=key)["Body"].read())
            return Path(self.path(name)).read_bytes()

    def read_chunks(self, name: str, chunk_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Read a whole file as `read` does, without holding all of it in memory."""
        with self._errors("read", name):
            if self.is_s3:
                bucket, _, key = self.path(name).partition("/")
                body = s3_client(anonymous=self.anonymous).get_object(Bucket=bucket, Key=key)["Body"]
                yield from body.iter_chunks(chunk_bytes)
            else:
                with Path(self.path(name)).open("rb") as file:
                    while chunk := file.read(chunk_bytes):
                        yield chunk

    def open(self, name: str) -> pa.NativeFile:
        """Open a seekable file for reading."""
        with self._errors("read", name):
            return self.filesystem.open_input_file(self.path(name))

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file atomically: a reader sees the previous content or this one, never a part."""
        self.write_buffers(name, (data,))

    def write_buffers(self, name: str, buffers: Buffers) -> None:
        """Write a whole file as `write` does, without joining its pieces in memory."""
        with self._errors("write", name):
            if self.is_s3:
                self._upload(name, buffers)
            else:
                _replace_atomically(Path(self.path(name)), buffers)

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
        with self._errors("create", name):
            return self._create_on_s3(name, data) if self.is_s3 else _create(Path(self.path(name)), data)

    def delete(self, name: str) -> None:
        """Delete a file or a folder if it exists. Another process may delete it at the same time."""
        with self._errors("delete", name):
            if not self.is_s3:
                _delete_local(Path(self.path(name)))
                return
            kind = self.filesystem.get_file_info(self.path(name)).type
            if kind == fs.FileType.Directory:
                self.filesystem.delete_dir(self.path(name))
            elif kind == fs.FileType.File:
                self.filesystem.delete_file(self.path(name))

    def exists(self, name: str = "") -> bool:
        with self._errors("read", name):
            return bool(self.filesystem.get_file_info(self.path(name)).type != fs.FileType.NotFound)

    def list(self, prefix: str = "") -> list[Entry]:
        """List all files below the folder `prefix`, sorted by name. The list is empty if the folder does not exist."""
        with self._errors("list", prefix):
            entries = self._list_s3(prefix) if self.is_s3 else self._list_local(prefix)
            return sorted(entries, key=lambda entry: entry.name)

    def names(self, folder: str) -> set[str]:
        """Return the names of the files in a folder, but not of those in its subfolders. This needs no look at each file."""
        with self._errors("list", folder):
            if self.is_s3:
                return {entry.name.removeprefix(f"{folder}/") for entry in self._list_s3(folder)}
            try:
                with os.scandir(self.path(folder)) as entries:
                    return {entry.name for entry in entries if entry.is_file()}
            except FileNotFoundError:
                return set()

    def check_writable(self) -> None:
        """Check that files can be written to the store.

        Raises:
            StorageError: They cannot be written.
        """
        self.write(".undula-write-test", b"")
        self.delete(".undula-write-test")

    def _upload(self, name: str, buffers: Buffers) -> None:
        from boto3.s3.transfer import TransferConfig

        bucket, _, key = self.path(name).partition("/")
        client, num_bytes = _s3_writer(self.anonymous), sum(len(buffer) for buffer in buffers)
        if num_bytes <= PART_BYTES:
            client.put_object(Bucket=bucket, Key=key, Body=b"".join(buffers))
            return
        part_bytes = part_size(num_bytes, PART_BYTES, MOST_PARTS)
        config = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=part_bytes)
        client.upload_fileobj(io.BufferedReader(_Joined(buffers)), bucket, key, Config=config)

    def _create_on_s3(self, name: str, data: bytes) -> bool:
        from botocore.exceptions import ClientError

        bucket, _, key = self.path(name).partition("/")
        client = _s3_writer(self.anonymous)
        try:
            client.put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status in (_CONFLICT, _EXISTS):  # another writer's request, or a former one of this call
                return self.exists(name) and self.read(name) == data
            if status != _NOT_IMPLEMENTED:
                raise
            if self.exists(name):
                return False
            client.put_object(Bucket=bucket, Key=key, Body=data)
        return True

    def _list_local(self, prefix: str) -> Iterator[Entry]:
        root = Path(self.path())
        for file in (root / prefix).rglob("*"):
            if file.is_file() and not file.name.endswith(".partial"):
                stat = file.stat()
                yield Entry(
                    file.relative_to(root).as_posix(), stat.st_size, f"size {stat.st_size}, mtime {stat.st_mtime_ns}"
                )

    def _list_s3(self, prefix: str) -> Iterator[Entry]:
        bucket, _, root = self.path().partition("/")
        root = f"{root}/" if root else ""
        pages = s3_client(anonymous=self.anonymous).get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=bucket, Prefix=root + (f"{prefix}/" if prefix else "")):
            for item in page.get("Contents", []):
                if not item["Key"].endswith("/"):
                    yield Entry(item["Key"].removeprefix(root), item["Size"], f"etag {item['ETag'].strip(chr(34))}")

    @contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (OSError, BotoCoreError, ClientError) as error:
            where = f"{self.url}/{name}" if name else self.url
            detail = " ".join((getattr(error, "strerror", None) or str(error)).split())
            raise StorageError(f"cannot {verb} {where}: {detail}") from error


def open_store(url: str, anonymous: bool = False) -> Store:
    """Return the store at `url`. This checks the scheme and the presence of S3 credentials but sends no request.

    Raises:
        StorageError: The scheme is not supported, or credentials are missing.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in ("", "s3"):
        raise StorageError(f"{url!r} has the scheme {scheme!r}, which is not supported; use a path or an s3:// URL")
    if scheme == "s3":
        if not anonymous:
            _require_s3_credentials(url)
        return Store(url.rstrip("/"), anonymous)
    return Store(str(Path(url).expanduser()))


def _require_s3_credentials(url: str) -> None:
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        found = boto3.Session().get_credentials() is not None
    except BotoCoreError as error:
        raise StorageError(f"cannot use {url}: {error}") from error
    if not found:
        raise StorageError(
            f"no AWS credentials were found for {url}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
            "or give the nodes an instance profile"
        )


def _region() -> str:
    import boto3

    # botocore reads AWS_DEFAULT_REGION and the profile's region, but not AWS_REGION.
    return os.environ.get("AWS_REGION") or boto3.Session().region_name or DEFAULT_REGION


@cache
def _s3_filesystem(anonymous: bool) -> fs.FileSystem:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return fs.S3FileSystem(
        region=_region(),
        endpoint_override=endpoint,
        allow_bucket_creation=False,
        anonymous=anonymous,
        request_timeout=REQUEST_TIMEOUT_S,
    )


@cache
def s3_client(config: Any = None, anonymous: bool = False) -> Any:
    """Return a boto3 client, which is cached for each botocore Config. Threads can share clients."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    if anonymous:
        config = (config or Config()).merge(Config(signature_version=UNSIGNED))
    return boto3.Session().client("s3", region_name=_region(), config=config)


@cache
def _s3_writer(anonymous: bool) -> Any:
    """Return a client for writing. It adds no checksums to requests, because not every S3 server accepts botocore's form of them."""
    from botocore.config import Config

    return s3_client(Config(request_checksum_calculation="when_required"), anonymous)


def part_size(num_bytes: int, least: int = PART_BYTES, most_parts: int = MOST_PARTS) -> int:
    """Return the size of the parts of a file on S3: `least`, or more if the file would have more than `most_parts` parts."""
    return max(least, -(-num_bytes // most_parts))


class _Joined(io.RawIOBase):
    """Seekable file with the content of several buffers, which are not copied."""

    def __init__(self, buffers: Buffers):
        self._buffers = buffers
        self._ends = list(accumulate(len(buffer) for buffer in buffers))
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._ends[-1]}
        self._position = starts[whence] + offset
        return self._position

    def readinto(self, target: Any) -> int:
        number = bisect_right(self._ends, self._position)  # skips empty buffers
        if number == len(self._ends):
            return 0
        begin = self._position - (self._ends[number] - len(self._buffers[number]))
        chunk = self._buffers[number][begin : begin + len(target)]
        target[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)


def _create(path: Path, data: bytes) -> bool:
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


def _delete_local(path: Path) -> None:
    def ignore_if_gone(function: object, name: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    if path.is_dir():
        shutil.rmtree(path, onerror=ignore_if_gone)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def _replace_atomically(path: Path, buffers: Buffers) -> None:
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
