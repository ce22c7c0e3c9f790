"""Detection of the GPUs of a cluster: those of its nodes, and those of the node types that its autoscaler can start."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
import requests
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.kuberay.node_provider import KubernetesHttpApiClient

Config = Mapping[str, Any]
"""Configuration of Ray's autoscaler, with the content of a cluster.yaml."""
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""File in which Kubernetes tells a pod its namespace."""
READ_LIMIT_S = 60.0
"""Maximum seconds for reading the configuration in a task on the head, which may first have to start a process."""


def offers_gpus() -> bool:
    """Return whether a node of the cluster has a GPU, or the autoscaler of the cluster can start such a node."""
    present: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return present.get("GPU", 0) > 0 or starts_gpus(config_of_cluster())


def starts_gpus(config: Config | None) -> bool:
    """Return whether an autoscaler with this configuration can start nodes with GPUs. None is a cluster without an autoscaler."""
    types = (config or {}).get("available_node_types", {}).values()
    return any(
        node_type.get("resources", {}).get("GPU", 0) > 0 and node_type.get("max_workers") != 0 for node_type in types
    )


def autoscaling_config(session: str) -> Config | None:
    """Return the configuration of the cluster's autoscaler, or None if there is no autoscaler. Call this on the head.

    Ray's head does not know the node types. On Kubernetes, they are in the RayCluster. Elsewhere, they are in the file that the autoscaler
    was started with.

    Args:
        session: Name of Ray's session, because several clusters may have their heads on this machine.
    """
    if cluster := os.environ.get("RAY_CLUSTER_NAME"):
        namespace = os.environ.get("RAY_CLUSTER_NAMESPACE") or _namespace_of_pod()
        return _config_in_kubernetes(cluster, namespace) if namespace else None
    for process in psutil.process_iter(["cmdline"]):
        options = dict(part.split("=", 1) for part in process.info["cmdline"] or () if "=" in part)
        file = options.get("--autoscaling-config")
        if file and Path(options.get("--logs-dir", "")).parent.name == session:
            with suppress(OSError, yaml.YAMLError):
                config: Config = yaml.safe_load(Path(file).expanduser().read_text())
                return config
    return None


def _namespace_of_pod() -> str | None:
    """Return the namespace of this pod; None if the pod has no account. KubeRay before 1.6 does not set it in the head's environment."""
    with suppress(OSError):
        return NAMESPACE_FILE.read_text().strip()
    return None


def _config_in_kubernetes(cluster: str, namespace: str) -> Config | None:
    """Return the configuration that KubeRay's autoscaler derives from the RayCluster; None if this pod may not read the RayCluster."""
    try:
        resource = KubernetesHttpApiClient(namespace).get(f"rayclusters/{cluster}")
    except (OSError, requests.RequestException):
        return None
    config: Config = _derive_autoscaling_config_from_ray_cr(resource)
    return config


def config_of_cluster() -> Config | None:
    """Return the configuration of the cluster's autoscaler from any of its nodes, or None."""
    session: str = ray._private.worker.global_worker.node.session_name  # type: ignore[union-attr]
    nodes: list[Mapping[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    heads = [node["NodeID"] for node in nodes if node["Alive"] and "node:__internal_head__" in node["Resources"]]
    if ray.get_runtime_context().get_node_id() in heads:
        return autoscaling_config(session)
    read: Any = ray.remote(autoscaling_config)
    tasks = [read.options(num_cpus=0, label_selector={"ray.io/node-id": head}).remote(session) for head in heads]
    with suppress(ray.exceptions.RayError):
        return next(iter(ray.get(tasks, timeout=READ_LIMIT_S)), None)
    return None
