"""The data of a job: one data set, or several mixed by weight, and what these have in common."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from json import dumps

from undula.data.manifest import Column, Manifest, load_manifest
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


Data = Manifest | Mixture
"""What a job reads."""


def load_data(spec: DataSpec) -> Data:
    """The training data of a job; ManifestError where it has no manifest."""
    if spec.mix is None:
        assert spec.train is not None
        return load_manifest(spec.train)
    return Mixture(tuple(load_manifest(part.url) for part in spec.mix), tuple(part.weight for part in spec.mix))
