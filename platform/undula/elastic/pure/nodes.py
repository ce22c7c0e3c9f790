"""A node of the cluster as the policies see it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A node that is alive."""

    id: str
    slots: int
    """Workers that fit on it when nothing else runs there."""
    free: int
    """Workers that fit on it beside what runs there now."""
    deadline: float | None
    """When it goes, in seconds since the epoch: infinity where that is not known, None where it stays."""
    market: str | None = None
    """The value of its label MARKET."""
    type: str | None = None
    """The value of its label TYPE."""


def workers_that_fit(resources: Mapping[str, float], per_worker: Mapping[str, float]) -> int:
    """How many workers a node's resources are enough for; a worker that needs nothing fits once."""
    needs = {name: amount for name, amount in per_worker.items() if amount > 0}
    # Ray counts in units of 1e-4; 0.3 from 0.9 goes three times.
    return int(min((resources.get(name, 0.0) / amount + 1e-4 for name, amount in needs.items()), default=1))
