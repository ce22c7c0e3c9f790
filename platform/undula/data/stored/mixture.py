"""Stored training data of a job: one data set, or several that are mixed by weight, behind one interface."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from json import dumps

from undula.data.spec import DataSpec
from undula.data.stored.manifest import Column, Manifest, difference, load_manifest
from undula.errors import ManifestError, SpecError
from undula.plan.keys import key64
from undula.plan.mix import Mix
from undula.plan.plan import Plan, PlanSpec


@dataclass(frozen=True)
class Mixture:
    """Several data sets and their weights. Sample ids count the rows of all data sets in order."""

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
        """Return the named columns, or all columns.

        Raises:
            ManifestError: The columns of the data sets differ.
        """
        first, *others = self.manifests
        selected = first.select(columns)
        for other in others:
            if text := difference(other.select(columns), selected):
                raise ManifestError(
                    f"{other.url} has other columns than {first.url}: {text}; mixed data sets need the same names, types and shapes, so "
                    "list the columns that both have in data.columns"
                )
        return selected

    def check_files(self) -> None:
        """Compare every shard with the files at its URL.

        Raises:
            ManifestError: A shard is missing or has changed.
        """
        for manifest in self.manifests:
            manifest.check_files()

    def check_plan(self, spec: PlanSpec) -> None:
        """Check that a plan can use all data sets.

        Raises:
            SpecError: A data set or its weight is too small for the plan.
        """
        for number, _ in enumerate(self.manifests):
            self.part_plan(spec, number)
        Mix(self.weights, spec.seed)

    def part_plan(self, spec: PlanSpec, number: int) -> Plan:
        """Return the plan that divides one data set into streams. It never ends: each virtual worker repeats its stream at its own pace.

        Raises:
            SpecError: The data set is too small for the plan.
        """
        seed = key64("mix", spec.seed, number)
        part = replace(
            spec, seed=seed, global_batch=spec.virtual_workers, epochs=2**40, max_steps=None, last_step="short"
        )
        assert isinstance(part, PlanSpec)
        manifest = self.manifests[number]
        try:
            return Plan(part, manifest.num_rows)
        except SpecError as error:
            raise SpecError(f"data.mix: {manifest.url}: {error}") from error


StoredData = Manifest | Mixture
"""Training data that the job's YAML names."""


def load_data(spec: DataSpec) -> StoredData:
    """Load the training data that a job's YAML names.

    Raises:
        ManifestError: A data set has no manifest.
    """
    if spec.mix is None:
        assert spec.train is not None
        return load_manifest(spec.train)
    return Mixture(tuple(load_manifest(part.url) for part in spec.mix), tuple(part.weight for part in spec.mix))
