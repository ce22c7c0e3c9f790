"""TensorBoard as a tracker, which shows all runs. Its event files in the run directory are what it has, so a new driver goes on after them.

Existing writers pass events to a thread through a queue: a full disk ends that thread, and the queue fills up. Files are written here in
the thread of the follower, whole, so that a reader never sees half of a record.
"""

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from undula.state.defaults import TENSORBOARD
from undula.telemetry.tracker import Entry, RunState, TrackedRun, TrackedStep

if TYPE_CHECKING:
    from undula.storage import Store

FILE_BYTES = 2**20
"""Size in bytes at which a file is complete and the next one begins. Until then, all of it is written again with new steps."""


class TensorBoardTracker:
    """Event files of a run.

    Args:
        store: Run directory.
    """

    name = "TensorBoard"

    def __init__(self, store: "Store"):
        self._store = store
        self._newest: int | None = None
        """Newest step in the files that this process did not write since it opened them last."""
        self._series, self._number = "", 0
        """Name of the files that are written from the last `open` on, and the number of the current one."""
        self._content = bytearray()
        """Content of the current file."""

    def check(self) -> None:
        """Check nothing, because TensorBoard's files need only what each run has."""

    def open(self, run: TrackedRun) -> int | None:
        self._newest = self._find_newest()
        self._series, self._number = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}", 0
        self._content.clear()
        return self._newest

    def send(self, steps: Sequence[TrackedStep]) -> None:
        from tensorboardX.proto.event_pb2 import Event  # takes a second, because it imports boto3
        from tensorboardX.proto.summary_pb2 import Summary

        if not self._content:
            self._begin_file()
        for step in steps:
            scalars = [Summary.Value(tag=name, simple_value=value) for name, value in step.values.items()]
            self._add(Event(wall_time=step.time, step=step.step, summary=Summary(value=scalars)))
        # TensorBoard reads files in the order of their names.
        self._store.write(f"{TENSORBOARD}/{self._series}.{self._number:06d}", bytes(self._content))
        if len(self._content) > FILE_BYTES:
            self._content.clear()
            self._number += 1

    def close(self, state: RunState) -> None:
        """Do nothing, because each step is in storage once it was sent."""

    def _begin_file(self) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if self._number == 0 and self._newest is not None:
            # TensorBoard drops later steps of earlier files, which a driver of another cluster may still be writing.
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=self._newest + 1, session_log=start))

    def _add(self, event: Any) -> None:
        """Append an event in the TFRecord format (tensorflow/core/lib/io/record_writer.cc)."""
        from tensorboardX.record_writer import masked_crc32c

        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._content += (
            length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
        )

    def _find_newest(self) -> int | None:
        names = self._store.names(TENSORBOARD)
        torn = {name for name in names if name.endswith(".partial")}
        for name in torn:  # a killed driver has left them, and TensorBoard would read them
            self._store.delete(f"{TENSORBOARD}/{name}")
        for name in sorted(names - torn, reverse=True):
            if steps := list(_steps_in(self._store.read(f"{TENSORBOARD}/{name}"))):
                return max(steps)
        return None


def _steps_in(content: bytes) -> Iterator[int]:
    """Yield the steps of the values in a file."""
    from tensorboardX.proto.event_pb2 import Event

    position = 0
    while position < len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        event = Event.FromString(content[position + 12 : position + 12 + length])
        if event.HasField("summary"):
            yield event.step
        position += 16 + length


ENTRY = Entry(lambda _, store: TensorBoardTracker(store))
