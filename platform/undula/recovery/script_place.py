"""How far the script has come after an update, which each rank of a sharded model notes in the memory of its node.

A rank that is killed leaves a snapshot and the updates since. Whether the script has changed the rank's part after the last of these, no
other rank knows.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from undula.recovery.baseline import Work
from undula.recovery.snapshot import PLACE

_FIELDS = struct.Struct("<qBB")


@dataclass(frozen=True)
class ScriptPlace:
    """The place to which the script had come on one rank."""

    step: int
    """Number of committed steps."""
    work: Work
    """What it had done since the last of them."""

    @classmethod
    def noted_in(cls, folder: Path | None) -> "ScriptPlace | None":
        """Return the place that a rank has noted in its folder in the memory of this node; None if it has noted none."""
        if folder is None:
            return None
        try:
            step, place, changes = _FIELDS.unpack((folder / PLACE).read_bytes())
        except (OSError, struct.error):
            return None
        return cls(step, Work(place, changes))


class PlaceFile:
    """File in which a rank notes how far the script has come.

    Args:
        folder: Folder of the rank in the memory of its node. Nothing is noted before there is a snapshot in it.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file: BinaryIO | None = None

    def note(self, step: int, work: Work) -> None:
        """Note what the script has done since the last of so many committed steps.

        Raises:
            OSError: The node has no memory for the file.
        """
        if self._file is None:
            if not self._folder.exists():
                return
            self._file = (self._folder / PLACE).open("wb", buffering=0)
        # One call, which no signal interrupts, so that a rank that is killed leaves the former place or this one.
        os.pwrite(self._file.fileno(), _FIELDS.pack(step, work.place, work.changes), 0)
