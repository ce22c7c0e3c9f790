"""Writer of scalars for TensorBoard, which keeps event files in memory until they have reached storage.

Existing writers pass events to a thread through a queue: a full disk ends that thread, the queue fills up, and training blocks forever.
"""

import socket
import struct
import threading
import time
from collections.abc import Mapping

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from undula.state.directory import TENSORBOARD
from undula.storage import Store

FILE_BYTES = 8 * 2**20
"""Size in bytes at which a file is complete and the next one begins."""


class TensorBoardWriter:
    """Writes the event files of one attempt.

    Args:
        store: Run directory.
        attempt: Number of the attempt.
        start: Step at which the attempt starts. TensorBoard drops the values that former attempts wrote from this step on.
    """

    def __init__(self, store: Store, attempt: int, start: int):
        self._store = store
        self._name = f"{TENSORBOARD}/events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.a{attempt}"
        self._lock = threading.Lock()
        self._files: dict[int, bytearray] = {}
        self._number = 0
        self._begin_file()
        if start:
            self._append(Event(wall_time=time.time(), step=start, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of scalars at a step, by name."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._append(Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Write all added values to storage.

        Raises:
            StorageError: The storage cannot be written to.
        """
        with self._lock:
            files = {number: bytes(data) for number, data in self._files.items()}
        for number, data in files.items():
            self._store.write(f"{self._name}.{number}", data)
            with self._lock:
                if number < self._number:
                    del self._files[number]

    def _append(self, event: Event) -> None:
        with self._lock:
            self._files[self._number] += _record(event.SerializeToString())
            if len(self._files[self._number]) > FILE_BYTES:
                self._number += 1
                self._begin_file()

    def _begin_file(self) -> None:
        self._files[self._number] = bytearray(
            _record(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        )


def _record(data: bytes) -> bytes:
    """Return data as a record of the TFRecord format (tensorflow/core/lib/io/record_writer.cc)."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
