"""Node types of a Ray cluster configuration (cluster.yaml), and the problems that a check of the configuration finds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NodeType:
    """Node type of a configuration."""

    name: str
    resources: Mapping[str, float]
    machine: str
    """Cloud's name of the machine type."""
    is_spot: bool
    max_price: str | None
    """Maximum spot price in US dollars per hour; None if the configuration sets none."""
    is_head: bool
    labels: Mapping[str, str]
    """Ray labels of the nodes."""
    max_workers: int
    """Maximum number of worker nodes of this type."""


def node_types(config: Mapping[str, Any]) -> list[NodeType]:
    """Return the node types of a configuration."""
    types = []
    for name, entry in config.get("available_node_types", {}).items():
        node = entry.get("node_config", {})
        market = mapping_of(node.get("InstanceMarketOptions"))
        scheduling = node.get("scheduling")
        scheduling = mapping_of(scheduling[0] if scheduling and isinstance(scheduling, list) else scheduling)
        is_head = name == config.get("head_node_type")
        types.append(
            NodeType(
                name,
                entry.get("resources", {}),
                node.get("InstanceType") or node.get("machineType") or "",
                market.get("MarketType") == "spot"
                or scheduling.get("preemptible") is True
                or scheduling.get("provisioningModel") == "SPOT",
                mapping_of(market.get("SpotOptions")).get("MaxPrice"),
                is_head,
                entry.get("labels", {}),
                entry.get("max_workers", 0 if is_head else most_nodes(config)),
            )
        )
    return types


def mapping_of(value: Any) -> Mapping[str, Any]:
    """Return `value`, or an empty mapping if it is not a mapping, because no schema covers the content of a node's configuration."""
    return value if isinstance(value, Mapping) else {}


def most_nodes(config: Mapping[str, Any]) -> int:
    """Return the maximum number of worker nodes. The default is the same as Ray's."""
    return int(config.get("max_workers", 2))
