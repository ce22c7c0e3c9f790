"""Choice of the data set that each sample of a mix comes from, as a fixed pattern that can be evaluated at any stream position."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from undula.errors import SpecError
from undula.plan.keys import Ids, key64

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
