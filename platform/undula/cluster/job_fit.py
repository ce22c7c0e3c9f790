"""Check whether the workers of a job fit on the node types of a cluster configuration, and whether they use the GPUs of these types."""

from collections.abc import Iterator, Mapping, Sequence

from undula.cluster.node_types import NodeType
from undula.elastic.pure.nodes import workers_that_fit
from undula.elastic.pure.spec import WorkersSpec
from undula.errors import Finding


def check_job(types: Sequence[NodeType], workers: WorkersSpec, most_nodes: int) -> list[Finding]:
    """Check that the workers of a job can train on a cluster.

    Args:
        types: Node types of the cluster.
        workers: Resources that the workers need.
        most_nodes: Maximum number of worker nodes of the cluster.
    """
    workers = workers.on_cluster(has_gpus=any(node.resources.get("GPU", 0) > 0 for node in types))
    return [*_check_fit(types, workers), *_check_idle_gpus(types, workers), *_check_room(types, workers, most_nodes)]


def _check_idle_gpus(types: Sequence[NodeType], workers: WorkersSpec) -> Iterator[Finding]:
    for node in types:
        gpus, own = node.resources.get("GPU", 0), workers.per_worker.get("GPU", 0)
        num_fitting = workers_that_fit(node.resources, workers.per_worker)
        if (idle := int(gpus - num_fitting * own)) < 1 or not num_fitting:
            continue
        cause = "workers.gpus is 0" if not own else f"only {num_fitting} of the job's workers fit on it"
        fix = "set workers.gpus to auto" if not own else "lower workers.cpus, or use another machine"
        yield Finding(
            "warning",
            f"available_node_types.{node.name}: {idle} of {gpus:g} GPUs would be idle, because {cause}; {fix}",
        )


def _check_fit(types: Sequence[NodeType], workers: WorkersSpec) -> Iterator[Finding]:
    needs = workers.per_worker
    for node in types:
        if not node.is_head and not workers_that_fit(node.resources, needs):
            short = [f"{amount:g} {name}" for name, amount in needs.items() if node.resources.get(name, 0) < amount]
            yield Finding(
                "error",
                f"available_node_types.{node.name}: a worker of the job needs {', '.join(short)} and does not fit; "
                "lower workers.cpus or workers.gpus, or use a larger machine",
            )


def _check_room(types: Sequence[NodeType], workers: WorkersSpec, most_nodes: int) -> Iterator[Finding]:
    """Check that the cluster can have as many nodes as the job needs.

    The check is skipped if a type has no resources in the configuration, because Ray detects them only later.
    """
    needs = workers.per_worker
    if any(not node.resources for node in types):
        return
    fleet = workers.fleet
    room = _room([node for node in types if node.is_spot or not fleet.spot_only], needs, most_nodes)
    if room < workers.min and any(workers_that_fit(node.resources, needs) for node in types):
        yield Finding(
            "error",
            f"max_workers: the cluster has room for {room} workers, but the job needs at least {workers.min} (workers.min); "
            "raise max_workers of the types and of the cluster, or lower workers.min",
        )
    wanted = workers.max if fleet.deadline else fleet.on_demand_floor or 0
    if (on_demand := _room([node for node in types if not node.is_spot], needs, most_nodes)) < wanted:
        what = "workers.fleet.deadline can need" if fleet.deadline else "workers.fleet.on_demand_floor needs"
        yield Finding(
            "warning",
            f"max_workers: on-demand types have room for {on_demand} workers, but {what} {wanted}; raise max_workers of these types",
        )


def _room(types: Sequence[NodeType], needs: Mapping[str, float], most_nodes: int) -> int:
    """Return the number of workers that fit on the head and on the maximum number of worker nodes, counting the largest types first."""
    room = sum(workers_that_fit(node.resources, needs) for node in types if node.is_head)
    fits = {node.name: workers_that_fit(node.resources, needs) for node in types}
    for node in sorted(types, key=lambda node: -fits[node.name]):
        if not node.is_head:
            nodes = min(node.max_workers, most_nodes)
            room, most_nodes = room + nodes * fits[node.name], most_nodes - nodes
    return room
