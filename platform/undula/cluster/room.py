"""Check that a job's workers fit on a cluster that cannot grow."""

from collections.abc import Mapping

from undula.elastic.pure.nodes import Shortage, shortage
from undula.elastic.pure.spec import WorkersSpec
from undula.elastic.ray.machine import machine_resources
from undula.errors import SpecError

_KEYS = {"CPU": "workers.cpus", "GPU": "workers.gpus"}
"""Key of a job for CPUs and GPUs; the keys of custom resources are below workers.resources."""


def refuse_what_never_fits(
    workers: WorkersSpec,
    origins: Mapping[str, str],
    num_cpus: int,
    num_workers: int,
    node: str,
    fix: str,
    share: int = 1,
) -> None:
    """Refuse a job whose workers do not fit on a local cluster, because no other node will join the cluster.

    Args:
        workers: Resources that each worker of the job needs.
        origins: Place where each of the job's values was set, by dotted key.
        num_cpus: Number of CPUs that the node is started with. Ray detects the other resources of this machine.
        num_workers: Number of workers that must fit on the node.
        node: Name of the node in the message, such as "this machine".
        fix: Alternative fix, which the message names after the change to the job.
        share: Number of trainings that share the resources of one worker.

    Raises:
        SpecError: A resource is missing. The message names the key, the requested and the existing amount, and the fix.
    """
    offered: Mapping[str, float] = {"CPU": num_cpus}
    needs_more = workers.on_cluster(has_gpus=False).per_worker.keys() - offered.keys()
    # With gpus: auto, a single worker fits with and without a GPU.
    if needs_more or (workers.gpus == "auto" and num_workers > 1):  # Ray takes a second to detect other resources
        offered = machine_resources(num_cpus)
    needed = workers.on_cluster(has_gpus=offered.get("GPU", 0) > 0).per_worker
    per_worker = {name: amount / share for name, amount in needed.items() if amount > 0}
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
        f"{place}: {wants}, but {node} has {has}, and a local cluster cannot grow; the job would wait forever and was not started; "
        f"set {key}={limit:g}{fix}"
    )
