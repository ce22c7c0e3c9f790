"""Micro-batches that a rank runs, step by step: in the order of the plan, or read ahead of it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from undula.data.reader import SampleReader
from undula.plan.plan import MicroBatch
from undula.recovery.progress import DATA, Phase
from undula.train.device_batches import DeviceBatches, PlacedSamples


class MicroBatches:
    """Reads the micro-batches of this rank.

    Args:
        work_of: Function that returns the rank's micro-batches in the step that begins with a step of the plan.
        reader: Samples of the rank.
        device: Device of the rank.
        enter: Function that records the phase that the rank enters.
    """

    def __init__(
        self,
        work_of: Callable[[int], Sequence[MicroBatch]],
        reader: SampleReader,
        device: torch.device,
        enter: Callable[[Phase], None],
    ):
        self._work_of = work_of
        self._batches = DeviceBatches(reader, device)
        self._enter = enter
        self._unread: list[MicroBatch] = []
        """Micro-batches that come next, as far as the first one of the next step."""
        self._loaded: list[PlacedSamples] = []

    def begin_step(self, index: int, next_index: int | None) -> Sequence[MicroBatch]:
        """Begin a step, and return its micro-batches.

        Args:
            index: Number of the step in the plan.
            next_index: Number of the step whose first micro-batch may be read ahead: the step after this one; None at the end of an epoch,
                because the script may change its dataset before the next one.
        """
        work = self._work_of(index)
        self._unread = [*work, *([] if next_index is None else self._work_of(next_index)[:1])]
        return work

    def load(self, work: Sequence[MicroBatch]) -> list[Any]:
        """Read all micro-batches of the step now, for `take` to return later. Return the batches of those that have samples."""
        self._loaded = [self._read() for _ in work]
        return [placed.batch for placed, micro_batch in zip(self._loaded, work, strict=True) if micro_batch.samples]

    def take(self) -> PlacedSamples:
        """Return the next micro-batch."""
        return self._loaded.pop(0) if self._loaded else self._read()

    def read_ahead(self) -> None:
        """Begin to read the micro-batch that comes next, if this device has time for it while it computes."""
        if self._batches.reads_ahead and self._unread and not self._loaded:
            self._enter(DATA)
            self._batches.begin_next(self._unread[0])

    def _read(self) -> PlacedSamples:
        self._enter(DATA)
        return self._batches.take(self._unread.pop(0))
