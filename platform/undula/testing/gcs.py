"""Asks a cluster's head about its nodes and actors, and drains nodes: one command a line on stdin, one JSON answer a line on stdout.

A process of its own, as Ray reads a cluster's token once in the life of a process: `python -m undula.testing.gcs ADDRESS`.
"""

import json
import sys
from importlib import import_module
from typing import Any

PREEMPTION = 2
"""DRAIN_NODE_REASON_PREEMPTION of Ray's autoscaler.proto."""
ALIVE = 0
"""GcsNodeInfo.ALIVE of Ray's gcs.proto."""


def main() -> None:
    raylet: Any = import_module("ray._raylet")
    client = raylet.GcsClient(address=sys.argv[1])
    state: Any = import_module("ray._private.state").GlobalState()
    options = raylet.GcsClientOptions.create(
        sys.argv[1], None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
    )
    state._initialize_global_state(options)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "alive":
            infos = client.get_all_node_info(timeout=10)
            answer: Any = [node.hex() for node, info in infos.items() if info.state == ALIVE]
        elif command == "count":
            groups = [group for group in state.placement_group_table().values() if group["state"] != "REMOVED"]
            answer = {"actors": len(state.actor_table(None, None, "ALIVE")), "placement groups": len(groups)}
        else:
            node, deadline_ms = arguments
            answer = client.drain_node(node, PREEMPTION, "spot", int(deadline_ms))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
