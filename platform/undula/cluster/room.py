"""Whether a job's workers fit on a cluster that cannot grow."""

from collections.abc import Mapping

from undula.elastic.pure.nodes import Shortage, shortage
from undula.elastic.pure.spec import WorkersSpec
from undula.elastic.ray.machine import machine_resources
from undula.errors import SpecError

_KEYS = {"CPU": "workers.cpus", "GPU": "workers.gpus"}
"""Key of a job for each resource that Ray has a name for; the others are below workers.resources."""


def refuse_what_never_fits(
    workers: WorkersSpec,
    origins: Mapping[str, str],
    num_cpus: int,
    num_workers: int,
    node: str,
    fix: str,
    share: int = 1,
) -> None:
    """Refuse a job whose workers a local cluster has no room for, as no node will ever join it.

    Args:
        workers: What each worker of the job needs.
        origins: Place of each of the job's values, by dotted key.
        num_cpus: Number of CPUs that the node is started with. Ray finds out what else this machine has.
        num_workers: Number of workers that must fit on the node.
        node: The node, as the message names it, such as "this machine".
        fix: Further fix that the message offers, after the one that changes the job.
        share: Number of trainings that share what one worker needs.

    Raises:
        SpecError: a resource is missing; one sentence names the key, what it asks for, what there is, and the fix.
    """
    per_worker = {"CPU": workers.cpus, "GPU": workers.gpus, **workers.resources}
    per_worker = {name: amount / share for name, amount in per_worker.items() if amount > 0}
    offered: Mapping[str, float] = {"CPU": num_cpus}
    if per_worker.keys() - offered.keys():  # Ray takes a second to look for what else there is
        offered = machine_resources(num_cpus)
    if missing := shortage(offered, per_worker, num_workers):
        raise SpecError(_sentence(missing, origins, num_workers, node, fix, share))


def _sentence(missing: Shortage, origins: Mapping[str, str], num_workers: int, node: str, fix: str, share: int) -> str:
    key = _KEYS.get(missing.resource, f"workers.resources.{missing.resource}")
    wants = f"{key} is {missing.needed * share:g}"
    if share > 1:
        wants = f"{wants}, shared by {share} packed trainings"
    if missing.num_fitting:
        wants = f"workers.min is {num_workers} and {wants}"
        key, limit = "workers.min", float(missing.num_fitting)
    else:
        limit = missing.offered * share
    plural = "s" if missing.resource in _KEYS and missing.offered > 1 else ""
    has = f"{missing.offered:g} {missing.resource}{plural}" if missing.offered else f"no {missing.resource}"
    place = origins.get(key, "default")
    return (
        f"{place}: {wants}, but {node} has {has}, and a local cluster cannot grow: the job would wait forever and was not started; "
        f"set {key}={limit:g}{fix}"
    )
