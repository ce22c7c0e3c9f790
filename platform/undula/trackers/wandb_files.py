"""Reader of the files that W&B writes for a run. They have LevelDB's log format (doc/log_format.md of github.com/google/leveldb) after a
header of their own.

A killed driver leaves a file that ends anywhere, and that lacks the last steps that W&B was given.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

HEADER_BYTES = 7
BLOCK_BYTES = 32 * 2**10
RECORD_HEADER = struct.Struct("<IHB")
"""Header of a part of a record: checksum, length in bytes, and type."""
TAIL_BYTES = 2**20
"""Number of bytes at the end of a file in which its newest step is looked for first."""
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def newest_step(folder: Path, run_id: str) -> int | None:
    """Return the newest step of a run in the files of all its submissions; None if there is none.

    Args:
        folder: Folder that was given to W&B as `dir`.
        run_id: Id of the run.
    """
    files = folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb")
    for file in sorted(files, key=lambda file: file.parent.name.partition("run-")[2], reverse=True):
        # Each submission continues after the newest step of the ones before it.
        for tail_bytes in (TAIL_BYTES, file.stat().st_size):
            if steps := history_steps(file, tail_bytes):
                return max(steps)
    return None


def history_steps(file: Path, tail_bytes: int | None = None) -> list[int]:
    """Return the numbers of the steps in a file, in the order in which they were written.

    Args:
        file: The file.
        tail_bytes: Number of bytes at the end of the file to read, rounded up to whole blocks; None to read all of it.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    size = file.stat().st_size
    start = max(size - (size if tail_bytes is None else tail_bytes), 0) // BLOCK_BYTES * BLOCK_BYTES
    with file.open("rb") as opened:
        opened.seek(start)
        data = opened.read()
    steps = []
    for content in records(data, position=0 if start else HEADER_BYTES):
        record = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            steps.append(int(record.history.step.num))
    return steps


def records(data: bytes, position: int) -> Iterator[bytes]:
    """Return the complete records in blocks of a file, from a position in the first block on."""
    record: bytes | None = None
    while position + RECORD_HEADER.size <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < RECORD_HEADER.size:  # the end of a block is padded with zeros
            position += left
            continue
        _, length, part = RECORD_HEADER.unpack_from(data, position)
        position += RECORD_HEADER.size
        content = data[position : position + length]
        position += length
        if part not in (FULL, FIRST, MIDDLE, LAST) or len(content) < length:
            return
        if part in (FULL, FIRST):
            record = content
        elif record is not None:  # otherwise, the record began before these blocks
            record += content
        if part in (FULL, LAST) and record is not None:
            yield record
            record = None
