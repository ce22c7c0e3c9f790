"""Files on S3 for libraries that read and write file objects. What is read is one version of an object, from its opening on."""

import io
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from undula.storage.retries import MissingError, named_errors
from undula.storage.s3_requests import PART_BYTES, Bucket, SeekableFile, Upload

FIRST_AHEAD_BYTES = 2**16
"""Number of bytes that the first small read fetches. The number doubles while reads follow one another, up to PART_BYTES."""
PARTS_IN_FLIGHT = 4
"""Number of parts of a file that are sent at the same time."""
PARTS_BEFORE_GROWTH = 1000
"""Number of parts of a file after which the size of the parts doubles, because S3 accepts 10,000 of them and the size is not known."""


class S3File(SeekableFile):
    """Seekable file for reading.

    Args:
        bucket: Bucket of the object.
        key: Key of the object.

    Raises:
        MissingError: The object does not exist.
    """

    def __init__(self, bucket: Bucket, key: str):
        head = bucket.head(key)
        if head is None:
            raise MissingError(f"{bucket.url}/{key} does not exist")
        super().__init__(head.bytes)
        self._bucket, self._object = bucket, head
        self._ahead_start, self._ahead = 0, memoryview(b"")
        self._ahead_bytes = FIRST_AHEAD_BYTES

    def readall(self) -> bytes:
        return self.read(max(self._bytes - self._position, 0)) or b""

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        view = view[: max(min(len(view), self._bytes - self._position), 0)]
        if len(view) and not self._from_ahead(view):
            if len(view) < self._ahead_bytes:
                self._read_ahead()
                self._from_ahead(view)
            else:
                self._fill(self._position, view)
        self._position += len(view)
        return len(view)

    def _from_ahead(self, view: memoryview) -> bool:
        begin = self._position - self._ahead_start
        if begin < 0 or begin + len(view) > len(self._ahead):
            return False
        view[:] = self._ahead[begin : begin + len(view)]
        return True

    def _read_ahead(self) -> None:
        """Fetch the bytes from the position on, more of them if the last ones fetched are near."""
        is_near = 0 <= self._position - self._ahead_start <= len(self._ahead)
        if self._ahead and is_near:
            self._ahead_bytes = min(2 * self._ahead_bytes, PART_BYTES)
        ahead = memoryview(bytearray(min(self._ahead_bytes, self._bytes - self._position)))
        self._fill(self._position, ahead)
        self._ahead_start, self._ahead = self._position, ahead

    def _fill(self, start: int, view: memoryview) -> None:
        with named_errors("read", f"{self._bucket.url}/{self._object.key}"):
            self._bucket.fill(self._object, [(start, view)])


class S3Output(io.RawIOBase):
    """File for writing. The object appears when the file is closed."""

    def __init__(self, bucket: Bucket, key: str):
        self._bucket, self._key = bucket, key
        self._rest = bytearray()
        self._position = 0
        self._upload: Upload | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._sent: list[Future[None]] = []

    def __del__(self) -> None:
        """Do not close the file, as io.IOBase does: a file that nobody has closed is not whole."""

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._rest += view
        self._position += len(view)
        if len(self._rest) >= PART_BYTES << len(self._sent) // PARTS_BEFORE_GROWTH:
            with named_errors("write", f"{self._bucket.url}/{self._key}"):
                self._send_part()
        return len(view)

    def close(self) -> None:
        if self.closed:
            return
        try:
            with named_errors("write", f"{self._bucket.url}/{self._key}"):
                if self._upload is None:
                    self._bucket.write(self._key, (bytes(self._rest),))
                else:
                    self._finish(self._upload)
        finally:
            if self._threads:
                self._threads.shutdown()
            super().close()

    def _send_part(self) -> None:
        if self._upload is None:
            self._upload = Upload(self._bucket, self._key)
            self._threads = ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="undula-upload")
        assert self._threads is not None
        if len(self._sent) >= PARTS_IN_FLIGHT:
            self._sent[-PARTS_IN_FLIGHT].result()  # bounds the memory of the parts that wait
        part, self._rest = bytes(self._rest), bytearray()
        self._sent.append(self._threads.submit(self._upload.send, len(self._sent) + 1, (part,)))

    def _finish(self, upload: Upload) -> None:
        with upload:
            if self._rest:
                self._send_part()
            for part in self._sent:
                part.result()
