"""Readers of a rank's samples from stored data, from any step on: of one data set, and of several that are mixed by weight."""

from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from undula.data.reader import SampleReader, Samples
from undula.data.spec import DataSpec
from undula.data.stored.cache import DiskCache
from undula.data.stored.manifest import Manifest
from undula.data.stored.maps import SampleFunction
from undula.data.stored.mixture import Mix, Mixture, StoredData
from undula.data.stored.read_ahead import ReadAhead
from undula.data.stored.reads import WindowReads
from undula.data.stored.rows import WindowRows, concatenated, samples_at
from undula.data.stored.windows import StreamMap, WindowReader, needed_windows
from undula.plan.keys import key64
from undula.plan.plan import Plan


def stored_reader(
    data: StoredData,
    plan: Plan,
    virtual_workers: range,
    spec: DataSpec,
    start: int = 0,
    function: SampleFunction | None = None,
) -> SampleReader:
    """Return the reader of the samples of a rank's virtual workers from step `start` on, which are the results of `function` if given."""
    positions = {v: range(plan.position(start, v), plan.position(plan.total_steps, v)) for v in virtual_workers}
    sample_map = _stream_map(function, data, plan, spec) if function else None
    if isinstance(data, Mixture):
        return MixtureReader(data, plan, positions, spec, sample_map)
    return DatasetReader(data, plan, positions, spec, sample_map)


class DatasetReader:
    """Samples of a rank's virtual workers from one data set over all epochs. Each virtual worker gets them in the order of its stream.

    Args:
        manifest: The data set.
        plan: Plan that divides the data set into streams.
        positions: For each virtual worker of this rank, the remaining positions of its stream, counted over all epochs.
        spec: Columns to read and amount to read ahead.
        sample_map: Map of the samples; None for none.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: Plan,
        positions: Mapping[int, range],
        spec: DataSpec,
        sample_map: StreamMap | None = None,
    ):
        self._plan = plan
        self._spec = spec
        self._map = sample_map
        self._reads = _window_reads(manifest, spec)
        self._todo = dict(positions)
        self._windows: ReadAhead[WindowRows] | None = None
        self._queues: dict[int, deque[WindowRows]] = {virtual_worker: deque() for virtual_worker in positions}
        """Windows that were read, but not taken completely."""
        self._spare: WindowRows | None = None

    def open(self) -> None:
        if self._windows is None:
            needed = needed_windows(self._reads, self._plan, dict(self._todo), self._map)
            windows = WindowReader(needed, self._spec)
            self._windows = ReadAhead(iter(windows), windows.interrupt)

    def take(self, virtual_worker: int, count: int) -> Samples:
        self.open()
        parts: list[Samples] = []
        while count:
            todo = self._todo[virtual_worker]
            epoch, position = divmod(todo.start, self._plan.consumed(virtual_worker))
            rows = self._window(virtual_worker, epoch, position)
            place = position - rows.start
            taken = min(count, rows.num_rows - place, self._plan.consumed(virtual_worker) - position)
            parts.append(rows.take(place, place + taken))
            self._todo[virtual_worker] = range(todo.start + taken, todo.stop)
            count -= taken
        return concatenated(parts)

    def any_rows(self, count: int) -> Samples:
        if self._spare is None:
            first = {next(iter(self._todo)): range(1)}
            read = next(needed_windows(self._reads, self._plan, first, self._map))
            self._spare = WindowRows(read, [read()])
        rows = self._spare.take(0, min(count, self._spare.num_rows))
        return rows if len(rows.ids) == count else samples_at(rows, np.arange(count) % len(rows.ids))

    def close(self) -> None:
        if self._windows:
            self._windows.close()
        self._windows, self._queues = None, {virtual_worker: deque() for virtual_worker in self._queues}

    def _window(self, virtual_worker: int, epoch: int, position: int) -> WindowRows:
        """Return the window with a position of a virtual worker's stream. Positions do not decrease."""
        queue = self._queues[virtual_worker]
        while queue and (queue[0].epoch < epoch or queue[0].start + queue[0].num_rows <= position):
            queue.popleft()
        while not queue:
            assert self._windows is not None
            rows = next(self._windows)
            self._queues[rows.virtual_worker].append(rows)
        return queue[0]


class MixtureReader:
    """Samples of a rank's virtual workers from a mix. The arguments are those of DatasetReader, with a mixture in place of the manifest."""

    def __init__(
        self,
        mixture: Mixture,
        plan: Plan,
        positions: Mapping[int, range],
        spec: DataSpec,
        sample_map: StreamMap | None = None,
    ):
        mixture.select(spec.columns)
        self._mix = Mix(mixture.weights, plan.spec.seed)
        self._positions = {v: todo.start for v, todo in positions.items()}
        self._first_ids = np.cumsum([0, *(manifest.num_rows for manifest in mixture.manifests)])
        counts = {v: (self._mix.counts(v, todo.start), self._mix.counts(v, todo.stop)) for v, todo in positions.items()}
        self._readers = [
            DatasetReader(
                manifest,
                mixture.part_plan(plan.spec, number),
                {v: range(int(start[number]), int(stop[number])) for v, (start, stop) in counts.items()},
                _shared(spec, mixture.weights[number] / sum(mixture.weights)),
                sample_map,
            )
            for number, manifest in enumerate(mixture.manifests)
        ]

    def open(self) -> None:
        for reader in self._readers:
            reader.open()

    def take(self, virtual_worker: int, count: int) -> Samples:
        sources = self._mix.sources(virtual_worker, self._positions[virtual_worker], count)
        self._positions[virtual_worker] += count
        parts = []
        for number in np.unique(sources):
            samples = self._readers[number].take(virtual_worker, int((sources == number).sum()))
            parts.append(replace(samples, ids=samples.ids + self._first_ids[number]))
        came_from = np.argsort(sources, kind="stable")  # place in the mix of each sample of the concatenated parts
        return samples_at(concatenated(parts), np.argsort(came_from, kind="stable"))

    def any_rows(self, count: int) -> Samples:
        return self._readers[0].any_rows(count)

    def close(self) -> None:
        with ExitStack() as stack:
            for reader in self._readers:
                stack.callback(reader.close)


def _window_reads(manifest: Manifest, spec: DataSpec) -> WindowReads:
    cache = DiskCache(spec.cache.folder, int(spec.cache.max_gib * 2**30)) if spec.cache else None
    return WindowReads(manifest, manifest.select(spec.columns), cache)


def _stream_map(function: SampleFunction, data: StoredData, plan: Plan, spec: DataSpec) -> StreamMap:
    first = data.manifests[0] if isinstance(data, Mixture) else data
    return StreamMap(function, key64("map", plan.spec.seed, 0), _window_reads(first, spec))


def _shared(spec: DataSpec, share: float) -> DataSpec:
    """Return the spec for one data set of a mix, with its share of the read-ahead."""
    part = replace(
        spec,
        head_mib=int(spec.head_mib * share),
        prefetch_mib=max(int(spec.prefetch_mib * share), 1),
        read_tasks=max(round(spec.read_tasks * share), 1),
    )
    assert isinstance(part, DataSpec)
    return part
