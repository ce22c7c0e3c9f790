"""Samples of a rank's virtual workers, from one data set or from a mix of several."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from undula.data.spec import DataSpec
from undula.data.stored.mapped import StreamMap
from undula.data.stored.maps import SampleFunction
from undula.data.stored.mixture import Mixture, StoredData
from undula.data.stored.rank_stream import RankStream, disk_cache
from undula.data.stored.rows import Samples, concatenated
from undula.plan.keys import key64
from undula.plan.mix import Mix
from undula.plan.plan import Plan


class MixedStream:
    """Samples of a rank's virtual workers from a mix. The arguments are those of RankStream, with a Mixture in place of the manifest."""

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
        self._streams = [
            RankStream(
                manifest,
                mixture.part_plan(plan.spec, number),
                {v: range(int(start[number]), int(stop[number])) for v, (start, stop) in counts.items()},
                _shared(spec, mixture.weights[number] / sum(mixture.weights)),
                sample_map,
            )
            for number, manifest in enumerate(mixture.manifests)
        ]

    def open(self) -> None:
        """Start reading ahead from all data sets."""
        for stream in self._streams:
            stream.open()

    def take(self, virtual_worker: int, count: int) -> Samples:
        """Return the next `count` samples of a virtual worker."""
        sources = self._mix.sources(virtual_worker, self._positions[virtual_worker], count)
        self._positions[virtual_worker] += count
        parts = []
        for number in np.unique(sources):
            samples = self._streams[number].take(virtual_worker, int((sources == number).sum()))
            parts.append(replace(samples, ids=samples.ids + self._first_ids[number]))
        came_from = np.argsort(sources, kind="stable")  # place in the mix of each sample of the concatenated parts
        return concatenated(parts).at(np.argsort(came_from, kind="stable"))

    def any_rows(self, count: int) -> Samples:
        """Return `count` arbitrary rows, some of them twice if need be, for a rank whose share of a short step is empty."""
        return self._streams[0].any_rows(count)

    def close(self) -> None:
        """Stop reading ahead."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.callback(stream.close)


SampleStream = RankStream | MixedStream


def rank_stream(
    data: StoredData,
    plan: Plan,
    virtual_workers: range,
    spec: DataSpec,
    start: int = 0,
    function: SampleFunction | None = None,
) -> SampleStream:
    """Return the samples of a rank's virtual workers from step `start` on."""
    positions = {v: range(plan.position(start, v), plan.position(plan.total_steps, v)) for v in virtual_workers}
    sample_map = _stream_map(function, data, plan, spec) if function else None
    if isinstance(data, Mixture):
        return MixedStream(data, plan, positions, spec, sample_map)
    return RankStream(data, plan, positions, spec, sample_map)


def _stream_map(function: SampleFunction, data: StoredData, plan: Plan, spec: DataSpec) -> StreamMap:
    first = data.manifests[0] if isinstance(data, Mixture) else data
    return StreamMap(function, key64("map", plan.spec.seed, 0), first, data.select(spec.columns), disk_cache(spec))


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
