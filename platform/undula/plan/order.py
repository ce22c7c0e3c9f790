"""The order of an epoch: a pure function of (seed, epoch, row counts of the row groups) and the plan.

The row groups, permuted, form a line of all rows. The line is cut into one contiguous stream per virtual worker, so that a row
group is read by one virtual worker, and by one more for each cut that falls into it. Step k takes the next rows of every stream. Within a
stream, rows are permuted inside windows of consecutive row groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from undula.plan.keys import key64, permutation
from undula.plan.plan import Plan

Ids = NDArray[np.int64]


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
    """Rows that are shuffled together: what a read task brings, in the order in which the stream wants them."""

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
        return np.arange(self.num_rows, dtype=np.int64) if self.key is None else permutation(self.num_rows, self.key)


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch. `row_counts` has shape [row groups], in manifest order."""

    plan: Plan
    row_counts: Ids
    epoch: int

    @cached_property
    def _permuted(self) -> Ids:
        if self.plan.spec.shuffle == "none":
            return np.arange(len(self.row_counts), dtype=np.int64)
        return permutation(len(self.row_counts), key64("row groups", self.plan.spec.seed, self.epoch))

    @cached_property
    def _line(self) -> Ids:
        """Where each permuted row group begins on the line, and its end; shape [row groups + 1]."""
        return np.concatenate(([0], np.cumsum(self.row_counts[self._permuted])))

    @cached_property
    def _first_rows(self) -> Ids:
        """The id of each row group's first row, in manifest order; shape [row groups + 1]."""
        return np.concatenate(([0], np.cumsum(self.row_counts)))

    @cached_property
    def _cuts(self) -> Ids:
        """Where each virtual worker's stream begins on the line, and the last one's end; shape [V + 1]."""
        lengths = [
            self.plan.full_steps * self.plan.virtual_worker_batch + self.plan.share(self.plan.full_steps, v)
            for v in range(self.plan.spec.virtual_workers)
        ]
        return np.concatenate(([0], np.cumsum(lengths)))

    def windows(self, virtual_worker: int, position: int = 0) -> Iterator[Window]:
        """The windows of a stream, in order, from the one that holds stream position `position`."""
        spec = self.plan.spec
        pieces = self._pieces(virtual_worker)
        size = spec.window if spec.shuffle == "window" else 1
        start = 0
        for number, first in enumerate(range(0, len(pieces), size)):
            key = None
            if spec.shuffle == "window":
                key = key64("window", spec.seed, self.epoch, virtual_worker, number)
            window = Window(virtual_worker, start, tuple(pieces[first : first + size]), key)
            start += window.num_rows
            if start > position:
                yield window

    def ids(self, step_in_epoch: int, virtual_worker: int) -> Ids:
        """Ids of the samples that a virtual worker consumes in a step, in order; shape [share]."""
        begin = step_in_epoch * self.plan.virtual_worker_batch
        end = begin + self.plan.share(step_in_epoch, virtual_worker)
        taken = [
            self._window_ids(window)[max(begin - window.start, 0) : end - window.start]
            for window in self.windows(virtual_worker, begin)
            if window.start < end
        ]
        return np.concatenate(taken) if taken else np.zeros(0, dtype=np.int64)

    def _window_ids(self, window: Window) -> Ids:
        rows = [self._first_rows[piece.row_group] + np.arange(piece.start, piece.stop) for piece in window.pieces]
        return np.concatenate(rows)[window.permutation()]

    def _pieces(self, virtual_worker: int) -> list[Piece]:
        begin, end = int(self._cuts[virtual_worker]), int(self._cuts[virtual_worker + 1])
        first = int(np.searchsorted(self._line, begin, side="right")) - 1
        pieces = []
        for slot in range(first, len(self._permuted)):
            left, right = int(self._line[slot]), int(self._line[slot + 1])
            if left >= end:
                break
            if min(right, end) > max(left, begin):
                pieces.append(Piece(int(self._permuted[slot]), max(left, begin) - left, min(right, end) - left))
        return pieces
