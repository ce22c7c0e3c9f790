"""Micro-batches that a rank runs, step by step: in the order of the plan, or read ahead of it.

Also here: micro-batches of a rank on its device. On a GPU, the next one is read and copied while the current one still computes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from undula.data.nested import moved, tensors_of, with_tensors
from undula.data.reader import SampleReader
from undula.parallel.device_clock import Mark, mark_on
from undula.plan.keys import Ids
from undula.plan.plan import MicroBatch
from undula.recovery.progress import DATA, Phase


@dataclass(frozen=True)
class PlacedSamples:
    """Samples of a micro-batch on the device, and the time that they took."""

    ids: Ids
    batch: Any
    data_s: float
    """Seconds for which the rank waited for the samples in host memory."""
    waits: tuple[Mark, Mark]
    """Points of the device's work between which it waited for the copy."""


@dataclass(frozen=True)
class _Copying:
    """Samples whose copy to the device has begun."""

    ids: Ids
    batch: Any
    data_s: float
    copied: torch.cuda.Event | None


class DeviceBatches:
    """Takes micro-batches from a reader of samples, and copies them to the device.

    Copies to a GPU go from pinned memory and on a stream of their own, so that they run beside the kernels of the model.

    Args:
        reader: Samples of the rank.
        device: Device of the rank.
        reads_ahead: Whether micro-batches are read before they are needed; by default on a GPU only, because a CPU that computes has no
            time for it.
    """

    def __init__(self, reader: SampleReader, device: torch.device, reads_ahead: bool | None = None):
        self._reader = reader
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.reads_ahead = device.type == "cuda" if reads_ahead is None else reads_ahead
        self._next: tuple[MicroBatch, _Copying | Exception] | None = None
        """Micro-batch that was begun, or the error with which this failed."""

    def begin_next(self, micro_batch: MicroBatch) -> None:
        """Read the micro-batch that `take` will ask for next, and begin to copy it.

        An error is raised by `take`, so that it does not prevent the commit of the current step.
        """
        if not micro_batch.samples:
            return
        assert self._next is None, "a micro-batch was begun but not taken"
        try:
            self._next = micro_batch, self._begin(micro_batch)
        except Exception as error:
            self._next = micro_batch, error

    def take(self, micro_batch: MicroBatch) -> PlacedSamples:
        """Return the samples of a micro-batch, or two arbitrary rows if it has none."""
        (known, begun), self._next = self._next or (None, None), None
        if begun is None:
            begun = self._begin(micro_batch)
        else:
            assert known == micro_batch, f"{known} was begun, and {micro_batch} was taken"
        if isinstance(begun, Exception):
            raise begun
        before = after = mark_on(self._device)
        if begun.copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(begun.copied)
            for tensor in tensors_of(begun.batch):
                tensor.record_stream(current)  # keeps the memory from being reused before the kernels have read it
            after = mark_on(self._device)
        # What moves itself does so on the stream of the kernels, because its tensors are not known.
        return PlacedSamples(
            begun.ids, moved(begun.batch, self._device) if begun.copied else begun.batch, begun.data_s, (before, after)
        )

    def _begin(self, micro_batch: MicroBatch) -> _Copying:
        began, size = time.perf_counter(), micro_batch.samples
        samples = self._reader.take(micro_batch.virtual_worker, size) if size else self._reader.any_rows(2)
        data_s = time.perf_counter() - began
        if self._copies is None:
            return _Copying(samples.ids, with_tensors(samples.batch, self._copy_of), data_s, None)
        with torch.cuda.stream(self._copies):
            placed = with_tensors(samples.batch, self._copy_of)
            return _Copying(samples.ids, placed, data_s, self._copies.record_event())

    def _copy_of(self, value: Tensor) -> Tensor:
        source = pinned(value) if self._copies else value
        return source.to(self._device, non_blocking=True)


def pinned(value: Tensor) -> Tensor:
    """Return a tensor in pinned memory, or the tensor itself if the script's `collate_fn` has put it on a device."""
    return value.pin_memory() if value.device.type == "cpu" else value


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
