"""Requests to a bucket. Keys are exact: `x/a` and `x//a` are two objects. Requests are repeated while the store is busy.

Also here: ETags: the form in which a server takes them in If-Match, and their comparison.

The standard requires quotes, and some servers refuse the request without them. Others compare the header with an ETag that has none, and a
few know no conditions at all. Which form a server takes shows when it refuses one for an object that has the ETag.
"""

import hashlib
import io
import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar

from undula.errors import StorageError
from undula.storage.retries import ChangedError, MissingError, retried, status_of
from undula.storage.s3 import s3_client

Form: TypeAlias = Literal["quoted", "bare", "none"]
_NEXT: dict[Form, Form] = {"quoted": "bare", "bare": "none", "none": "none"}
_forms: dict[str, Form] = {}
"""Form that each endpoint takes, if it does not take the first one."""


def bare(etag: str) -> str:
    """Return an ETag without quotes and without the prefix of a weak one."""
    return etag.removeprefix("W/").strip('"')


def is_same(one: str, other: str) -> bool:
    """Whether two ETags are the same, whatever their quotes and their case are."""
    return bare(one).casefold() == bare(other).casefold()


def etag_of_parts(etags: Sequence[str]) -> str | None:
    """Return the ETag of an object that was sent in parts, given theirs in order; None if these are no MD5 digests, as with KMS."""
    try:
        digests = b"".join(bytes.fromhex(bare(etag)) for etag in etags)
    except ValueError:
        return None
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"


def form_for(endpoint: str) -> Form:
    """Return the form in which ETags are sent to an endpoint."""
    return _forms.get(endpoint, "quoted")


def condition(etag: str, form: Form) -> dict[str, str]:
    """Return the parameters of a request that is conditional on an ETag."""
    return {} if form == "none" else {"IfMatch": f'"{bare(etag)}"' if form == "quoted" else bare(etag)}


def refused(endpoint: str, form: Form) -> None:
    """Record that an endpoint has refused a form for an object that has the ETag."""
    if form_for(endpoint) == form:  # another thread may have recorded it
        _forms[endpoint] = _NEXT[form]


def forget_forms() -> None:
    """Drop what is known about the endpoints."""
    _forms.clear()


PART_BYTES = 16 * 2**20
"""Maximum size in bytes of a range request, and minimum size of the parts in which a larger file is sent. S3 itself requires 5 MiB."""
MOST_PARTS = 10_000
"""Maximum number of parts of a file on S3."""
PARALLEL_REQUESTS = 8
"""Maximum number of requests of this process that carry parts of files at the same time."""
_KEYS_OF_PAGE = 950
"""Number of known keys for which one page of a listing is requested. A page has 1000, so this leaves space for keys between them."""
_REFUSED, _MISSING, _CONFLICT, _UNMET, _OUT_OF_RANGE, _NOT_IMPLEMENTED = 400, 404, 409, 412, 416, 501

Buffers: TypeAlias = Sequence[bytes | memoryview]
"""Content of a file in pieces, one after another. A memoryview must be of bytes."""
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Object:
    """One object of a bucket."""

    key: str
    bytes: int
    etag: str


@dataclass(frozen=True)
class Bucket:
    """Bucket on S3."""

    name: str
    anonymous: bool = False
    """Whether requests are unsigned."""

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def head(self, key: str) -> Object | None:
        """Return an object; None if it does not exist."""
        from botocore.exceptions import ClientError

        try:
            answer = self._send("head_object", Key=key)
        except ClientError as error:
            if status_of(error) == _MISSING:
                return None
            raise
        return Object(key, answer["ContentLength"], answer["ETag"])

    def read(self, key: str) -> bytes:
        """Read a whole object with one request, so that the result is the content of a single write."""
        return retried(lambda: bytes(self._once("get_object", Key=key)["Body"].read()), self.url)

    def read_into(self, source: Object, start: int, into: memoryview, limit_s: float | None = None) -> None:
        """Fill `into` with the bytes of an object from `start` on, with one request.

        Raises:
            MissingError: The object does not exist.
            ChangedError: The object has another ETag.
            StorageError: The store does not support range requests.
        """
        retried(lambda: self._read_range(source, start, into), self.url, limit_s)

    def fill(self, source: Object, ranges: Iterable[tuple[int, memoryview]]) -> None:
        """Fill the views with the bytes of an object from their start on. Large ones are read in parts, several at a time."""
        in_parallel(
            lambda part: self.read_into(source, *part), [piece for wanted in ranges for piece in parts(*wanted)]
        )

    def list(self, prefix: str = "", is_flat: bool = False, after: str = "") -> Iterator[Object]:
        """Yield the objects whose keys begin with `prefix`, ordered by key.

        Args:
            prefix: Beginning of the keys.
            is_flat: Whether to leave out keys that have a slash after the prefix.
            after: Key to begin after.
        """
        more = {"Delimiter": "/"} if is_flat else {}
        if after:
            more["StartAfter"] = after
        while True:
            page = self._send("list_objects_v2", Prefix=prefix, **more)
            for entry in page.get("Contents", ()):
                yield Object(entry["Key"], entry["Size"], entry["ETag"])
            if not page.get("IsTruncated"):
                return
            more["ContinuationToken"] = page["NextContinuationToken"]

    def find(self, keys: Sequence[str]) -> Iterator[Object]:
        """Yield those of some keys that exist. The keys are sorted.

        The keys say where each page of a listing begins, so that the pages can be requested at the same time.
        """

        def page(start: int) -> Sequence[Object]:
            wanted = keys[start : start + _KEYS_OF_PAGE]
            # A long prefix spares the server a look at the other keys. Prefixes of S3 do not end at slashes.
            prefix = os.path.commonprefix((wanted[0], wanted[-1]))  # noqa: RUF071
            listed = self.list(prefix, after=keys[start - 1] if start else "")
            # The listing is lazy, so a page that has the last of the keys is not followed by another request.
            upto, known = itertools.takewhile(lambda entry: entry.key <= wanted[-1], listed), set(wanted)
            return [entry for entry in upto if entry.key in known]

        for objects in in_parallel(page, range(0, len(keys), _KEYS_OF_PAGE)):
            yield from objects

    def has_any(self, prefix: str) -> bool:
        """Return whether there is a key that begins with `prefix`."""
        return bool(self._send("list_objects_v2", Prefix=prefix, MaxKeys=1).get("Contents"))

    def write(self, key: str, buffers: Buffers) -> None:
        """Write a whole object. It appears when all of it is stored."""
        num_bytes = sum(len(buffer) for buffer in buffers)
        if num_bytes <= PART_BYTES:
            self._send("put_object", Key=key, Body=b"".join(buffers))
            return
        upload = Upload(self, key)
        with upload:
            size = part_size(num_bytes, PART_BYTES, MOST_PARTS)
            in_parallel(
                lambda place: upload.send(place + 1, slices(buffers, place * size, size)), range(-(-num_bytes // size))
            )

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if it does not exist, and return whether this call did. See `Store.create`."""
        from botocore.exceptions import ClientError

        try:
            self._send("put_object", Key=key, Body=data, IfNoneMatch="*")
        except ClientError as error:
            if status_of(error) in (_CONFLICT, _UNMET):  # another writer's request, or a former one of this call
                return self.head(key) is not None and self.read(key) == data
            if status_of(error) != _NOT_IMPLEMENTED:
                raise
            if self.head(key):
                return False
            self._send("put_object", Key=key, Body=data)
        return True

    def delete(self, key: str) -> None:
        """Delete an object if it exists."""
        self._send("delete_object", Key=key)

    def delete_below(self, prefix: str) -> None:
        """Delete all objects whose keys begin with `prefix`, one by one, because not every S3 server deletes several with one request."""
        in_parallel(self.delete, [entry.key for entry in self.list(prefix)])

    def _send(self, operation: str, **parameters: Any) -> Any:
        return retried(lambda: self._once(operation, **parameters), self.url)

    def _once(self, operation: str, **parameters: Any) -> Any:
        return getattr(s3_client(self.anonymous), operation)(Bucket=self.name, **parameters)

    def _read_range(self, source: Object, start: int, into: memoryview) -> None:
        from botocore.exceptions import ClientError

        asked = f"bytes {start}-{start + len(into) - 1}"
        try:
            answer = self._conditional("get_object", source.etag, Key=source.key, Range=asked.replace(" ", "="))
        except ClientError as error:
            if status_of(error) == _MISSING:
                raise MissingError(f"{self.url}/{source.key} does not exist") from error
            if status_of(error) == _OUT_OF_RANGE:
                raise _changed(self, source) from error
            raise
        if not is_same(answer["ETag"], source.etag):
            raise _changed(self, source)
        if not str(answer.get("ContentRange")).startswith(f"{asked}/"):
            raise StorageError(
                f"cannot read {self.url}/{source.key}: the store returned another range than the requested one; "
                "use a store that supports range requests"
            )
        done = 0
        while count := answer["Body"].readinto(into[done : done + 2**20]):
            done += count
        if done != len(into):
            raise ConnectionError(f"the connection ended after {done} of {len(into)} bytes")

    def _conditional(self, operation: str, etag: str, **parameters: Any) -> Any:
        """Send a request on condition of an ETag. The answer may be of another ETag, because some servers ignore the condition.

        A server that refuses the form of the ETag gets the same request without it. If the answer has the ETag, the condition was true.
        """
        from botocore.exceptions import ClientError

        endpoint = str(s3_client(self.anonymous).meta.endpoint_url)
        form = form_for(endpoint)
        try:
            return self._once(operation, **parameters, **condition(etag, form))
        except ClientError as error:
            if form == "none" or status_of(error) not in (_REFUSED, _UNMET, _NOT_IMPLEMENTED):
                raise
        answer = self._once(operation, **parameters)
        if is_same(answer["ETag"], etag):
            refused(endpoint, form)
        return answer


class Upload:
    """Upload of an object in parts. The object appears at the end of the block, unless there is an exception."""

    def __init__(self, bucket: Bucket, key: str):
        self._bucket, self._key = bucket, key
        self._id: str = bucket._send("create_multipart_upload", Key=key)["UploadId"]
        self._etags: dict[int, str] = {}

    def send(self, number: int, buffers: Buffers) -> None:
        """Send the part with a number, from 1 on. Threads can send parts at the same time."""

        def put() -> str:
            body = io.BufferedReader(Joined(buffers))
            sent = self._bucket._once("upload_part", Key=self._key, UploadId=self._id, PartNumber=number, Body=body)
            return str(sent["ETag"])

        self._etags[number] = retried(put, self._bucket.url)

    def __enter__(self) -> "Upload":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind:
            with suppress(Exception):  # the first exception says more
                self._bucket._send("abort_multipart_upload", Key=self._key, UploadId=self._id)
            return
        from botocore.exceptions import ClientError

        parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(self._etags.items())]
        try:
            self._bucket._send(
                "complete_multipart_upload", Key=self._key, UploadId=self._id, MultipartUpload={"Parts": parts}
            )
        except ClientError as error:
            # The request was sent again because its answer was lost. S3 answers as before, and other stores have forgotten the upload.
            if status_of(error) != _MISSING or not self._is_stored():
                raise

    def _is_stored(self) -> bool:
        """Return whether the object is there, by the ETag that follows from those of its parts."""
        stored = self._bucket.head(self._key)
        expected = etag_of_parts([etag for _, etag in sorted(self._etags.items())])
        return stored is not None and expected is not None and is_same(stored.etag, expected)


def split_path(path: str, anonymous: bool = False) -> tuple[Bucket, str]:
    """Return the bucket and the key of `bucket/key`."""
    name, _, key = path.partition("/")
    return Bucket(name, anonymous), key


def part_size(num_bytes: int, least: int = PART_BYTES, most_parts: int = MOST_PARTS) -> int:
    """Return the size of the parts of a file on S3: `least`, or more if the file would have more than `most_parts` parts."""
    return max(least, -(-num_bytes // most_parts))


def parts(start: int, view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Split a range of bytes into ranges of at most PART_BYTES."""
    for offset in range(0, len(view), PART_BYTES):
        yield start + offset, view[offset : offset + PART_BYTES]


def in_parallel(function: Callable[[A], B], arguments: Sequence[A]) -> list[B]:
    """Call a function with each argument, several at a time. It must not call this function again."""
    if len(arguments) < 2:
        return [function(argument) for argument in arguments]
    return list(_threads().map(function, arguments))


def slices(buffers: Buffers, start: int, length: int) -> Buffers:
    """Return the part [start, start + length) of some buffers without copying it."""
    pieces: list[memoryview] = []
    for buffer in buffers:
        piece = memoryview(buffer)[max(start, 0) : max(start + length, 0)]
        if piece:
            pieces.append(piece)
        start -= len(buffer)
    return pieces


class SeekableFile(io.RawIOBase):
    """File for reading, in which subclasses read from `_position` on.

    Args:
        num_bytes: Size of the file in bytes.
    """

    def __init__(self, num_bytes: int):
        self._bytes, self._position = num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        return self._bytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._bytes}
        self._position = starts[whence] + offset
        return self._position


class Joined(SeekableFile):
    """Content of several buffers, which are not copied."""

    def __init__(self, buffers: Buffers):
        super().__init__(sum(map(len, buffers)))
        self._buffers = buffers
        self._ends = list(itertools.accumulate(map(len, buffers)))

    def readinto(self, target: Any) -> int:
        number = bisect_right(self._ends, self._position)  # skips empty buffers
        if number == len(self._ends):
            return 0
        begin = self._position - (self._ends[number] - len(self._buffers[number]))
        chunk = self._buffers[number][begin : begin + len(target)]
        target[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)


def _changed(bucket: Bucket, source: Object) -> ChangedError:
    return ChangedError(f"{bucket.url}/{source.key} has changed")


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(PARALLEL_REQUESTS, thread_name_prefix="undula-s3")
