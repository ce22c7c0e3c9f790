"""Choice of the seeds over which learning rates are compared. Pure.

A loss differs between seeds, so means over different sets of seeds differ without any influence of the learning rate.
"""

from collections import Counter
from collections.abc import Collection, Iterable


def common_seeds(seeds_of_results: Iterable[Collection[int]]) -> tuple[int, ...]:
    """Return the seeds over which to compare results, given the seeds of each result.

    The first one is the seed that most results have, and the lowest of several such seeds. Results without it cannot be compared. All
    seeds that the other results have in common are added to it.
    """
    sets = [set(seeds) for seeds in seeds_of_results if seeds]
    counts = Counter(seed for seeds in sets for seed in seeds)
    if not counts:
        return ()
    first = min(counts, key=lambda seed: (-counts[seed], seed))
    return tuple(sorted(set.intersection(*(seeds for seeds in sets if first in seeds))))
