"""The order of an epoch: a pure function of (seed, epoch, row counts of the row groups) and the plan.

The row groups, permuted, form a line of all rows. The line is cut into one contiguous stream per virtual worker, so that a row
group is read by one virtual worker, and by one more for each cut that falls into it. Step k takes the next rows of every stream. Within a
stream, rows are permuted inside windows of consecutive row groups.

Any step's samples can be asked for without those before: an epoch costs O(row groups) once, a step O(samples * log(row groups)).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from undula.plan.keys import Ids, key64, permuted, subkeys
from undula.plan.plan import Plan


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one row group, `start` and `stop` counted within it."""

    row_group: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Window:
    """Rows of one stream that are shuffled together."""

    virtual_worker: int
    start: int
    """Position in the stream of the window's first row."""
    pieces: tuple[Piece, ...]
    key: int | None
    """Key of the permutation of its rows; None keeps them as stored."""

    @property
    def num_rows(self) -> int:
        return sum(piece.num_rows for piece in self.pieces)

    def permutation(self) -> Ids:
        """Rows of the pieces, laid end to end, in stream order; shape [num_rows]."""
        places = np.arange(self.num_rows, dtype=np.int64)
        return places if self.key is None else permuted(places, self.num_rows, self.key)


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch. `row_counts` has shape [row groups], in manifest order."""

    plan: Plan
    row_counts: Ids
    epoch: int

    def step_ids(self, step_in_epoch: int) -> Ids:
        """Ids of a step's samples, virtual worker after virtual worker; shape [samples of the step]."""
        shares = [self.plan.share(step_in_epoch, v) for v in range(self.plan.spec.virtual_workers)]
        workers = np.repeat(np.arange(len(shares)), shares)
        within = np.arange(len(workers)) - np.repeat(np.cumsum(shares) - shares, shares)
        return self._ids(workers, step_in_epoch * self.plan.virtual_worker_batch + within)

    def ids(self, step_in_epoch: int, virtual_worker: int) -> Ids:
        """Ids of the samples that a virtual worker consumes in a step, in order; shape [share]."""
        begin = step_in_epoch * self.plan.virtual_worker_batch
        return self.ids_at(virtual_worker, np.arange(begin, begin + self.plan.share(step_in_epoch, virtual_worker)))

    def ids_at(self, virtual_worker: int, positions: Ids) -> Ids:
        """Ids at positions of a virtual worker's stream; shape of the positions."""
        return self._ids(np.full(len(positions), virtual_worker), positions)

    def windows(self, virtual_worker: int, position: int = 0) -> Iterator[Window]:
        """The windows of a stream, in order, from the one that holds stream position `position`.

        Where the last step wraps, the stream begins anew after its end.
        """
        length = int(np.diff(self._cuts)[virtual_worker])
        while position < self.plan.consumed(virtual_worker):
            lap, place = divmod(position, length)
            number, begin, end = (
                int(value) for value in self._windows_of(np.array(virtual_worker), self._cuts[virtual_worker] + place)
            )
            start = lap * length + begin - int(self._cuts[virtual_worker])
            key = int(self._window_keys(virtual_worker, number)) if self.plan.spec.shuffle == "window" else None
            window = Window(virtual_worker, start, self._pieces(begin, end), key)
            yield window
            position = start + window.num_rows

    @cached_property
    def _row_groups(self) -> Ids:
        """Those that have rows, as they lie on the line; shape [slots]."""
        filled = np.flatnonzero(self.row_counts)
        if self.plan.spec.shuffle == "none":
            return filled
        key = key64("row groups", self.plan.spec.seed, self.epoch)
        return filled[permuted(np.arange(len(filled)), len(filled), key)]

    @cached_property
    def _line(self) -> Ids:
        """Where each slot's row group begins on the line, and the line's end; shape [slots + 1]."""
        return np.concatenate(([0], np.cumsum(self.row_counts[self._row_groups])))

    @cached_property
    def _first_ids(self) -> Ids:
        """The id of the first row of each slot's row group; shape [slots]."""
        return (np.cumsum(self.row_counts) - self.row_counts)[self._row_groups]

    @cached_property
    def _cuts(self) -> Ids:
        """Where each virtual worker's stream begins on the line, and the last one's end; shape [V + 1]."""
        lengths = [self.plan.stream_length(v) for v in range(self.plan.spec.virtual_workers)]
        return np.concatenate(([0], np.cumsum(lengths)))

    @cached_property
    def _window_key(self) -> int:
        return key64("window", self.plan.spec.seed, self.epoch)

    def _window_keys(self, virtual_workers: int | Ids, numbers: int | Ids) -> NDArray[np.uint64]:
        return subkeys(self._window_key, virtual_workers, numbers)

    def _slots(self, line_positions: Ids) -> Ids:
        return np.searchsorted(self._line, line_positions, side="right") - 1

    def _windows_of(self, workers: Ids, line_positions: Ids) -> tuple[Ids, Ids, Ids]:
        """The windows that hold some places of the line, for the streams of these virtual workers.

        Returns:
            Number of the window in its stream, and where it begins and ends on the line; shape of the arguments.
        """
        size = self.plan.spec.window if self.plan.spec.shuffle == "window" else 1
        first_slots = self._slots(self._cuts[workers])
        numbers = (self._slots(line_positions) - first_slots) // size
        slots = first_slots + numbers * size
        begins = np.maximum(self._line[slots], self._cuts[workers])
        ends = np.minimum(self._line[np.minimum(slots + size, len(self._line) - 1)], self._cuts[workers + 1])
        return numbers, begins, ends

    def _ids(self, workers: Ids, positions: Ids) -> Ids:
        """Ids at positions of the streams of virtual workers, elementwise."""
        line_positions = self._cuts[workers] + positions % np.diff(self._cuts)[workers]
        if self.plan.spec.shuffle == "window":
            numbers, begins, ends = self._windows_of(workers, line_positions)
            keys = self._window_keys(workers, numbers)
            line_positions = begins + permuted(line_positions - begins, ends - begins, keys)
        slots = self._slots(line_positions)
        return self._first_ids[slots] + line_positions - self._line[slots]

    def _pieces(self, begin: int, end: int) -> tuple[Piece, ...]:
        """The rows between two places of the line."""
        first, last = (int(slot) for slot in self._slots(np.array([begin, end - 1])))
        return tuple(
            Piece(int(self._row_groups[slot]), max(left, begin) - left, min(right, end) - left)
            for slot in range(first, last + 1)
            for left, right in [(int(self._line[slot]), int(self._line[slot + 1]))]
        )
