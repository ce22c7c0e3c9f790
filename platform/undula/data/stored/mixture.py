"""Stored training data of a job: one data set, or several that are mixed by weight, behind one interface.

Also here: choice of the data set that each sample of a mix comes from, as a fixed pattern that can be evaluated at any stream position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from json import dumps

import numpy as np

from undula.data.spec import DataSpec
from undula.data.stored.manifest import Column, Manifest, difference, load_manifest
from undula.errors import ManifestError, SpecError
from undula.plan.keys import Ids, key64
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


PERIOD = 2**16
"""Number of samples after which a mix repeats. Weights are rounded to multiples of 1 / PERIOD."""


@dataclass(frozen=True)
class Mix:
    """Several data sets mixed by weight. Sample n of virtual worker v comes from data set `sources(v, n, 1)[0]`.

    Each data set has a share of the places of a period, rounded by the largest remainder method and spread as evenly as possible. Each
    virtual worker starts at a different place, keyed by the seed. Otherwise all virtual workers would draw the same data set at once.
    """

    weights: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        for number, share in enumerate(self._shares):
            if share == 0:
                raise SpecError(
                    f"data.mix: the weight of data set {number + 1} is {self.weights[number]} of {sum(self.weights)}, "
                    f"less than one sample in {PERIOD}; raise the weight or remove the data set"
                )

    def sources(self, virtual_worker: int, position: int, count: int) -> Ids:
        """Return the index of the data set of each sample at positions [position, position + count) of a stream; shape [count]."""
        return self._pattern[(self._phase(virtual_worker) + position + np.arange(count)) % PERIOD]

    def counts(self, virtual_worker: int, position: int) -> Ids:
        """Return how many of a stream's first `position` samples come from each data set; shape [data sets]."""
        phase = self._phase(virtual_worker)
        return self._counts_to(phase + position) - self._counts_to(phase)

    def _phase(self, virtual_worker: int) -> int:
        return key64("mix", self.seed, virtual_worker) % PERIOD

    def _counts_to(self, place: int) -> Ids:
        laps, rest = divmod(place, PERIOD)
        counts: Ids = laps * self._shares + self._before[rest]
        return counts

    @cached_property
    def _shares(self) -> Ids:
        """Number of places of each data set in a period; shape [data sets]."""
        exact = np.array(self.weights) / sum(self.weights) * PERIOD
        shares: Ids = np.floor(exact).astype(np.int64)
        shares[np.argsort(shares - exact, kind="stable")[: PERIOD - shares.sum()]] += 1
        return shares

    @cached_property
    def _pattern(self) -> Ids:
        """Index of the data set at each place of a period. The places of a data set are evenly spaced; shape [PERIOD]."""
        numbers = np.repeat(np.arange(len(self.weights)), self._shares)
        times = np.concatenate([(np.arange(share) + 0.5) / share for share in self._shares])
        pattern: Ids = numbers[np.argsort(times, kind="stable")]
        return pattern

    @cached_property
    def _before(self) -> Ids:
        """Number of places of each data set before each place of a period; shape [PERIOD, data sets]."""
        is_of = self._pattern[:, None] == np.arange(len(self.weights))
        before: Ids = np.cumsum(is_of, axis=0) - is_of
        return before
