"""A node of the cluster, as the policies see it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A node that is alive."""

    id: str
    slots: int
    """Number of workers that fit on the empty node."""
    free: int
    """Number of workers that fit beside the current load."""
    deadline: float | None
    """Time at which the node is removed, in seconds since the epoch: infinity where it is not known, None for a node that stays."""
    market: str | None = None
    """Value of the node's label MARKET."""
    type: str | None = None
    """Value of the node's label TYPE."""


def workers_that_fit(resources: Mapping[str, float], per_worker: Mapping[str, float]) -> int:
    """Number of workers for which a node's resources suffice; of workers that need nothing, one fits."""
    needs = {name: amount for name, amount in per_worker.items() if amount > 0}
    # Ray counts in units of 1e-4, which absorbs the rounding of 0.9 / 0.3.
    return int(min((resources.get(name, 0.0) / amount + 1e-4 for name, amount in needs.items()), default=1))


@dataclass(frozen=True)
class Shortage:
    """The resource that lets the fewest workers fit on a node."""

    resource: str
    """Name of the resource, as Ray has it."""
    needed: float
    """Amount that one worker needs."""
    offered: float
    """Amount that the node has."""
    num_fitting: int
    """Number of workers that fit on the node."""


def shortage(offered: Mapping[str, float], per_worker: Mapping[str, float], num_workers: int) -> Shortage | None:
    """What keeps workers from fitting on one node; None where all of them fit.

    Args:
        offered: Resources of the node, by Ray's names.
        per_worker: Resources that each worker needs, by Ray's names.
        num_workers: Number of workers that must fit.
    """
    num_fitting = workers_that_fit(offered, per_worker)
    if num_fitting >= num_workers:
        return None
    scarcest = min(
        (name for name, amount in per_worker.items() if amount > 0),
        key=lambda name: offered.get(name, 0.0) / per_worker[name],
        default=None,
    )
    if scarcest is None:
        return None
    return Shortage(scarcest, per_worker[scarcest], offered.get(scarcest, 0.0), num_fitting)
