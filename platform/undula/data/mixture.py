"""Several data sets mixed by weight: what they have in common, and the stream that draws on each at its own pace."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from json import dumps

import numpy as np

from undula.data.manifest import Column, Manifest, load_manifest
from undula.data.maps import SampleFunction
from undula.data.rank_stream import RankStream
from undula.data.rows import Samples, concatenated
from undula.data.spec import DataSpec
from undula.errors import ManifestError, SpecError
from undula.plan.keys import key64
from undula.plan.mix import Mix
from undula.plan.plan import Plan, PlanSpec


@dataclass(frozen=True)
class Mixture:
    """Data sets and their weights. Ids count rows over all data sets, one after another."""

    manifests: tuple[Manifest, ...]
    weights: tuple[float, ...]

    @property
    def url(self) -> str:
        return " and ".join(manifest.url for manifest in self.manifests)

    @property
    def num_rows(self) -> int:
        return sum(manifest.num_rows for manifest in self.manifests)

    @property
    def digest(self) -> str:
        parts = [[manifest.digest, weight] for manifest, weight in zip(self.manifests, self.weights, strict=True)]
        return sha256(dumps(parts).encode()).hexdigest()

    def select(self, columns: Sequence[str] | None) -> tuple[Column, ...]:
        """The named columns, or all; ManifestError where the data sets do not have the same ones."""
        first, *others = self.manifests
        selected = first.select(columns)
        for other in others:
            if other.select(columns) != selected:
                raise ManifestError(
                    f"{other.url} has other columns than {first.url}: mixed data sets share names, types and shapes; "
                    "name those that are the same in data.columns"
                )
        return selected

    def check_files(self) -> None:
        """Compare every shard with what is there now; ManifestError names the first that differs."""
        for manifest in self.manifests:
            manifest.check_files()

    def check_plan(self, spec: PlanSpec) -> None:
        """SpecError where a plan cannot draw on one of the data sets."""
        for number, _ in enumerate(self.manifests):
            self.part_plan(spec, number)
        Mix(self.weights, spec.seed)

    def part_plan(self, spec: PlanSpec, number: int) -> Plan:
        """How one data set is cut into streams: a plan of its own that never ends, each virtual worker going its own pace."""
        seed = key64("mix", spec.seed, number)
        part = replace(
            spec, seed=seed, global_batch=spec.virtual_workers, epochs=2**40, max_steps=None, last_step="short"
        )
        assert isinstance(part, PlanSpec)
        manifest = self.manifests[number]
        try:
            return Plan(part, manifest.num_rows)
        except SpecError as error:
            raise SpecError(f"{manifest.url} in data.mix: {error}") from error


class MixedStream:
    """Samples of some virtual workers of a mix; takes what RankStream takes, with a Mixture in place of the manifest."""

    def __init__(
        self,
        mixture: Mixture,
        plan: Plan,
        positions: Mapping[int, range],
        spec: DataSpec,
        function: SampleFunction | None = None,
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
                function,
            )
            for number, manifest in enumerate(mixture.manifests)
        ]

    def open(self) -> None:
        for stream in self._streams:
            stream.open()

    def take(self, virtual_worker: int, count: int) -> Samples:
        """The next `count` samples of a virtual worker."""
        sources = self._mix.sources(virtual_worker, self._positions[virtual_worker], count)
        self._positions[virtual_worker] += count
        parts = []
        for number in np.unique(sources):
            samples = self._streams[number].take(virtual_worker, int((sources == number).sum()))
            parts.append(replace(samples, ids=samples.ids + self._first_ids[number]))
        came_from = np.argsort(sources, kind="stable")  # place in the mix of each sample of the parts, end to end
        return concatenated(parts).at(np.argsort(came_from, kind="stable"))

    def any_rows(self, count: int) -> Samples:
        """Up to `count` rows, for a rank whose share of a short step is empty."""
        return self._streams[0].any_rows(count)

    def close(self) -> None:
        with ExitStack() as stack:
            for stream in self._streams:
                stack.callback(stream.close)


Data = Manifest | Mixture
"""What a job reads."""
Stream = RankStream | MixedStream


def load_data(spec: DataSpec) -> Data:
    """The training data of a job; ManifestError where it has no manifest."""
    if spec.mix is None:
        assert spec.train is not None
        return load_manifest(spec.train)
    return Mixture(tuple(load_manifest(part.url) for part in spec.mix), tuple(part.weight for part in spec.mix))


def rank_stream(
    data: Data,
    plan: Plan,
    virtual_workers: range,
    spec: DataSpec,
    start: int = 0,
    function: SampleFunction | None = None,
) -> Stream:
    """The samples of a rank's virtual workers from step `start` on."""
    positions = {v: range(plan.position(start, v), plan.position(plan.total_steps, v)) for v in virtual_workers}
    if isinstance(data, Mixture):
        return MixedStream(data, plan, positions, spec, function)
    return RankStream(data, plan, positions, spec, function)


def _shared(spec: DataSpec, share: float) -> DataSpec:
    """What one data set of a mix may hold ahead."""
    part = replace(
        spec,
        head_mib=int(spec.head_mib * share),
        prefetch_mib=max(int(spec.prefetch_mib * share), 1),
        read_tasks=max(round(spec.read_tasks * share), 1),
    )
    assert isinstance(part, DataSpec)
    return part
