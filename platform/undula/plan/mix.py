"""Which data set each sample of a mix comes from: a fixed pattern, so that the mix of any stretch is known without those before it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from undula.errors import SpecError
from undula.plan.keys import Ids, key64

PERIOD = 2**16
"""Samples after which a mix repeats; weights are rounded to its fractions."""


@dataclass(frozen=True)
class Mix:
    """Data sets by weight. A virtual worker's n-th sample comes from data set `sources(v, n, 1)`, whatever was read before.

    Within a period each data set has its share of places, by largest remainder, spread as evenly as they go; each virtual worker
    begins at a place of its own, keyed by the seed, so that a step whose shares are small does not draw on one data set alone.
    """

    weights: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        for number, share in enumerate(self._shares):
            if share == 0:
                raise SpecError(
                    f"data.mix has weight {self.weights[number]} of {sum(self.weights)} for its data set {number + 1}, "
                    f"less than one sample in {PERIOD}: give it more, or leave it out"
                )

    def sources(self, virtual_worker: int, position: int, count: int) -> Ids:
        """Number of the data set of each sample at positions [position, position + count) of a stream; shape [count]."""
        return self._pattern[(self._phase(virtual_worker) + position + np.arange(count)) % PERIOD]

    def counts(self, virtual_worker: int, position: int) -> Ids:
        """How many of a stream's first `position` samples come from each data set; shape [data sets]."""
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
        """Places of each data set in a period; shape [data sets]."""
        exact = np.array(self.weights) / sum(self.weights) * PERIOD
        shares: Ids = np.floor(exact).astype(np.int64)
        shares[np.argsort(shares - exact, kind="stable")[: PERIOD - shares.sum()]] += 1
        return shares

    @cached_property
    def _pattern(self) -> Ids:
        """Data set of each place of a period, each one's places evenly apart; shape [PERIOD]."""
        numbers = np.repeat(np.arange(len(self.weights)), self._shares)
        times = np.concatenate([(np.arange(share) + 0.5) / share for share in self._shares])
        pattern: Ids = numbers[np.argsort(times, kind="stable")]
        return pattern

    @cached_property
    def _before(self) -> Ids:
        """Places of each data set before each place of a period; shape [PERIOD, data sets]."""
        is_of = self._pattern[:, None] == np.arange(len(self.weights))
        before: Ids = np.cumsum(is_of, axis=0) - is_of
        return before
