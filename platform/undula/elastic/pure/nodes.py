"""Nodes of the cluster, and the number of workers that fit on them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """Node that is alive."""

    id: str
    slots: int
    """Number of workers that fit on the empty node."""
    free: int
    """Number of workers that fit into the node's free resources."""
    deadline: float | None
    """Time at which the node will be removed, in seconds since the epoch; infinity if the time is unknown, None if the node stays."""
    market: str | None = None
    """Value of the node's label MARKET; None without the label."""
    type: str | None = None
    """Value of the node's label TYPE; None without the label."""


def workers_that_fit(resources: Mapping[str, float], per_worker: Mapping[str, float]) -> int:
    """Return the number of workers that fit into a node's resources; 1 if a worker needs no resources."""
    needs = {name: amount for name, amount in per_worker.items() if amount > 0}
    # The added 1e-4, which is Ray's unit of resources, compensates for rounding, such as that of 0.9 / 0.3.
    return int(min((resources.get(name, 0.0) / amount + 1e-4 for name, amount in needs.items()), default=1))


def fix_of_unseen_gpus(cuda: str | None) -> str:
    """Return what to do if torch does not see the GPUs of a node, given the version of CUDA that torch was built with."""
    return "check nvidia-smi and the driver on the node" if cuda else "install a build of torch with CUDA on the node"


@dataclass(frozen=True)
class Shortage:
    """Resource of which a node has too little for the wanted number of workers."""

    resource: str
    """Ray's name of the resource."""
    needed: float
    """Amount that one worker needs."""
    offered: float
    """Amount that the node has."""
    num_fitting: int
    """Number of workers that fit on the node."""


def shortage(offered: Mapping[str, float], per_worker: Mapping[str, float], num_workers: int) -> Shortage | None:
    """Return the scarcest resource if not all workers fit on one node, or None if they fit.

    Args:
        offered: Amount of each resource that the node has, by Ray's name of the resource.
        per_worker: Amount of each resource that a worker needs, by Ray's name of the resource.
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
