"""Order of the samples in an epoch: a pure function of the plan, the epoch and the row counts of the row groups.

The row groups, in a permuted order, form a line of all rows. The line is cut into one contiguous stream for each virtual worker. A row
group is therefore read by one virtual worker, plus one more for each cut inside it. Step k takes the next rows of every stream. Within a
stream, rows are permuted inside windows of consecutive row groups.

The samples of a step can be computed without the steps before it: an epoch costs O(row groups) once, and a step costs
O(samples * log(row groups)).

A dataset whose samples are read one by one by index has no row groups: its epoch is permuted as a whole, and step k takes the next
samples of that one line.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from undula.plan.keys import Ids, key64, permuted, subkeys
from undula.plan.plan import SHUFFLES, Permutations, Plan


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of one row group. `start` and `stop` count from the first row of the row group."""

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
    """Position of the window's first row in the stream."""
    ranges: tuple[RowRange, ...]
    """Rows of the window, as stored."""
    key: int | None
    """Key of the permutation of the rows; None keeps the stored order."""

    @property
    def num_rows(self) -> int:
        return sum(rows.num_rows for rows in self.ranges)

    def permutation(self) -> Ids:
        """Return the stream order of the window's rows, as indices into its concatenated ranges; shape [num_rows]."""
        places = np.arange(self.num_rows, dtype=np.int64)
        return places if self.key is None else permuted(places, self.num_rows, self.key)


@dataclass(frozen=True)
class EpochOrder:
    """Order of one epoch. `row_counts` has shape [row groups], in manifest order."""

    plan: Plan
    row_counts: Ids
    epoch: int

    def step_ids(self, step_in_epoch: int) -> Ids:
        """Return the ids of a step's samples, ordered by virtual worker; shape [samples of the step]."""
        shares = [self.plan.share(step_in_epoch, v) for v in range(self.plan.spec.virtual_workers)]
        workers = np.repeat(np.arange(len(shares)), shares)
        within = np.arange(len(workers)) - np.repeat(np.cumsum(shares) - shares, shares)
        return self._ids(workers, step_in_epoch * self.plan.virtual_worker_batch + within)

    def ids(self, step_in_epoch: int, virtual_worker: int) -> Ids:
        """Return the ids of the samples that a virtual worker consumes in a step, in order; shape [share]."""
        begin = step_in_epoch * self.plan.virtual_worker_batch
        return self.ids_at(virtual_worker, np.arange(begin, begin + self.plan.share(step_in_epoch, virtual_worker)))

    def ids_at(self, virtual_worker: int, positions: Ids) -> Ids:
        """Return the ids at some positions of a virtual worker's stream, in the shape of `positions`."""
        return self._ids(np.full(len(positions), virtual_worker), positions)

    def windows(self, virtual_worker: int, position: int = 0) -> Iterator[Window]:
        """Yield the windows of a stream in order, starting with the window that holds `position`.

        If the last step wraps, the stream starts over after its end.
        """
        length = int(np.diff(self._cuts)[virtual_worker])
        while position < self.plan.consumed(virtual_worker):
            lap, place = divmod(position, length)
            number, begin, end = (
                int(value) for value in self._windows_of(np.array(virtual_worker), self._cuts[virtual_worker] + place)
            )
            start = lap * length + begin - int(self._cuts[virtual_worker])
            key = int(self._window_keys(virtual_worker, number)) if self._permutes.of_rows else None
            window = Window(virtual_worker, start, self._ranges(begin, end), key)
            yield window
            position = start + window.num_rows

    @cached_property
    def _permutes(self) -> Permutations:
        return SHUFFLES[self.plan.spec.shuffle]

    @cached_property
    def _row_groups(self) -> Ids:
        """Indices of the row groups that have rows, in the order of the line; shape [slots]."""
        filled = np.flatnonzero(self.row_counts)
        if not self._permutes.of_row_groups:
            return filled
        key = key64("row groups", self.plan.spec.seed, self.epoch)
        return filled[permuted(np.arange(len(filled)), len(filled), key)]

    @cached_property
    def _line(self) -> Ids:
        """Start of each slot's row group on the line, and the end of the line; shape [slots + 1]."""
        return np.concatenate(([0], np.cumsum(self.row_counts[self._row_groups])))

    @cached_property
    def _first_ids(self) -> Ids:
        """Id of the first row of each slot's row group; shape [slots]."""
        return (np.cumsum(self.row_counts) - self.row_counts)[self._row_groups]

    @cached_property
    def _cuts(self) -> Ids:
        """Start of each virtual worker's stream on the line, and the end of the last stream; shape [V + 1]."""
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
        """Find the windows that hold some places of the line, in the streams of the given virtual workers.

        Returns:
            Index of each window in its stream, and its begin and end on the line; each in the shape of the arguments.
        """
        size = self.plan.spec.window if self._permutes.of_rows else 1
        first_slots = self._slots(self._cuts[workers])
        numbers = (self._slots(line_positions) - first_slots) // size
        slots = first_slots + numbers * size
        begins = np.maximum(self._line[slots], self._cuts[workers])
        ends = np.minimum(self._line[np.minimum(slots + size, len(self._line) - 1)], self._cuts[workers + 1])
        return numbers, begins, ends

    def _ids(self, workers: Ids, positions: Ids) -> Ids:
        """Return the ids at positions of the virtual workers' streams, elementwise."""
        line_positions = self._cuts[workers] + positions % np.diff(self._cuts)[workers]
        if self._permutes.of_rows:
            numbers, begins, ends = self._windows_of(workers, line_positions)
            keys = self._window_keys(workers, numbers)
            line_positions = begins + permuted(line_positions - begins, ends - begins, keys)
        slots = self._slots(line_positions)
        return self._first_ids[slots] + line_positions - self._line[slots]

    def _ranges(self, begin: int, end: int) -> tuple[RowRange, ...]:
        """Return the rows between two places of the line."""
        first, last = (int(slot) for slot in self._slots(np.array([begin, end - 1])))
        return tuple(
            RowRange(int(self._row_groups[slot]), max(left, begin) - left, min(right, end) - left)
            for slot in range(first, last + 1)
            for left, right in [(int(self._line[slot]), int(self._line[slot + 1]))]
        )


@dataclass(frozen=True)
class IndexOrder:
    """Order of one epoch of a dataset whose samples are read by index. A step costs O(samples of the step), at any position."""

    plan: Plan
    epoch: int

    def step_ids(self, step_in_epoch: int) -> Ids:
        """Return the ids of a step's samples, ordered by virtual worker; shape [samples of the step]."""
        begin = step_in_epoch * self.plan.spec.global_batch
        return self._ids(begin, begin + self.plan.step(step_in_epoch).samples)

    def ids(self, step_in_epoch: int, virtual_worker: int) -> Ids:
        """Return the ids of the samples that a virtual worker consumes in a step, in order; shape [share]."""
        begin = step_in_epoch * self.plan.spec.global_batch
        begin += sum(self.plan.share(step_in_epoch, before) for before in range(virtual_worker))
        return self._ids(begin, begin + self.plan.share(step_in_epoch, virtual_worker))

    def _ids(self, begin: int, end: int) -> Ids:
        """Return the ids at positions [begin, end) of the epoch. If the last step wraps, positions go on from the epoch's beginning."""
        positions = np.arange(begin, end, dtype=np.int64) % self.plan.num_rows
        return positions if self.plan.spec.shuffle == "none" else permuted(positions, self.plan.num_rows, self._key)

    @cached_property
    def _key(self) -> int:
        return key64("indices", self.plan.spec.seed, self.epoch)
