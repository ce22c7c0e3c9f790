"""Memory of the GPUs of a cluster, before any worker starts on them."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from undula.elastic.pure.nodes import workers_that_fit
from undula.elastic.ray.cluster_gpus import config_of_cluster
from undula.plan.fleet import GPU_GIB, MACHINE
from undula.plan.gpus import gpu_of_machine

LIMIT_S = 20.0
"""Maximum seconds for asking the nodes."""
KIND = "accelerator_type:"
"""Beginning of the name of Ray's resource for the kind of a node's GPUs."""


@dataclass(frozen=True)
class NodeGpu:
    """A GPU of a node."""

    kind: str
    """Ray's name of its kind, such as A10G; empty if Ray does not know it."""
    memory_bytes: float


def smallest_gpu(per_worker: Mapping[str, float]) -> NodeGpu | None:
    """Return the GPU with the least memory on which a worker may be placed; None if the memory of no GPU is known.

    The nodes that are up count, or those that the autoscaler can start if none is up. The label GPU_GIB gives the memory. A node without
    the label is asked for it, and for a node type without it, it follows from the machine type.

    Args:
        per_worker: Resources of a worker.
    """
    nodes: list[Mapping[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    present = [node for node in nodes if node["Alive"] and workers_that_fit(node["Resources"], per_worker)]
    if present:
        told = [*_labelled((node["Resources"], node["Labels"]) for node in present), *_asked(present)]
    else:
        types = (config_of_cluster() or {}).get("available_node_types", {}).values()
        startable = [
            each
            for each in types
            if each.get("max_workers") != 0 and workers_that_fit(each.get("resources", {}), per_worker)
        ]
        told = [
            *_labelled((each.get("resources", {}), each.get("labels", {})) for each in startable),
            *_of_machines(each.get("labels", {}) for each in startable),
        ]
    return min(told, key=lambda gpu: gpu.memory_bytes, default=None)


def _labelled(nodes: Iterator[tuple[Mapping[str, float], Mapping[str, str]]]) -> Iterator[NodeGpu]:
    for resources, labels in nodes:
        with suppress(KeyError, ValueError):
            yield NodeGpu(_kind(resources), float(labels[GPU_GIB]) * 2**30)


def _of_machines(labels: Iterator[Mapping[str, str]]) -> Iterator[NodeGpu]:
    for each in labels:
        if GPU_GIB not in each and (gpu := gpu_of_machine(each.get(MACHINE, ""))):
            yield NodeGpu(gpu.title.partition(" ")[0], gpu.memory_bytes)


def _asked(nodes: Sequence[Mapping[str, Any]]) -> Iterator[NodeGpu]:
    task: Any = ray.remote(least_memory)
    asked = {
        task.options(num_cpus=0, label_selector={"ray.io/node-id": node["NodeID"]}).remote(
            node["Resources"]["GPU"]
        ): node
        for node in nodes
        if GPU_GIB not in node["Labels"]
    }
    answered = ray.wait(list(asked), num_returns=len(asked), timeout=LIMIT_S)[0] if asked else []
    for reference in answered:
        with suppress(ray.exceptions.RayError):
            if size := ray.get(reference):
                yield NodeGpu(_kind(asked[reference]["Resources"]), size)


def _kind(resources: Mapping[str, float]) -> str:
    return next((name.removeprefix(KIND) for name in resources if name.startswith(KIND)), "")


def least_memory(count: float) -> float | None:
    """Return the bytes of this machine's smallest GPU that CUDA can use; None if NVIDIA's tool is not there or cannot tell them.

    If the machine has more than `count` GPUs, the number that Ray has, it is the largest one, because any of them may be Ray's.
    """
    query = ["nvidia-smi", "--query-gpu=memory.total,memory.reserved", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, check=True, capture_output=True, text=True, timeout=LIMIT_S / 2).stdout
        rows = [[float(cell) for cell in line.split(",")] for line in told.splitlines()]
        sizes = [(total - reserved) * 2**20 for total, reserved in rows]
        return max(sizes) if len(sizes) > count else min(sizes)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
