"""Asks a cluster's head about its nodes and actors, and drains nodes: one command a line on stdin, one JSON answer a line on stdout.

A process of its own, as Ray reads a cluster's token once in the life of a process: `python -m undula.cluster.gcs ADDRESS`.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from undula.errors import ClusterError

PREEMPTION = 2
"""DRAIN_NODE_REASON_PREEMPTION of Ray's autoscaler.proto."""
ALIVE = 0
"""GcsNodeInfo.ALIVE of Ray's gcs.proto."""


class Head:
    """The head of a cluster, as asked by a process of its own.

    Args:
        address: of its head; `auto` for the cluster that this machine is a node of.
        env: environment of the process, with the cluster's token.
    """

    def __init__(self, address: str, env: Mapping[str, str]):
        self._address = address
        self._asking = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "undula.cluster.gcs", address],
            env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def ask(self, command: str) -> Any:
        """The answer to one command.

        Raises:
            ClusterError: there is none.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._asking:
            try:
                self._process.stdin.write(f"{command}\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
        if not line:
            raise ClusterError(f"the head of the cluster at {self._address} does not answer")
        return json.loads(line)

    def drain(self, node: str, deadline: float | None) -> None:
        """Tell the cluster that a node will go, at a time in seconds since the epoch where one is known.

        Raises:
            ClusterError: it does not take it.
        """
        accepted, why = self.ask(f"drain {node} {int((deadline or 0.0) * 1e3)}")
        if not accepted:
            raise ClusterError(f"node {node[:8]} cannot be drained: {why}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    raylet: Any = import_module("ray._raylet")
    address = sys.argv[1]
    if address == "auto":
        address = import_module("ray._private.services").canonicalize_bootstrap_address_or_die(address)
    client = raylet.GcsClient(address=address)
    state: Any = import_module("ray._private.state").GlobalState()
    options = raylet.GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    state._initialize_global_state(options)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "alive":
            answer: Any = list(_alive(client))
        elif command == "here":
            own = import_module("ray.util").get_node_ip_address()
            answer = [node for node, info in _alive(client).items() if info.node_manager_address == own]
        elif command == "count":
            groups = [group for group in state.placement_group_table().values() if group["state"] != "REMOVED"]
            answer = {"actors": len(state.actor_table(None, None, "ALIVE")), "placement groups": len(groups)}
        else:
            node, deadline_ms = arguments
            answer = client.drain_node(node, PREEMPTION, "spot", int(deadline_ms))
        print(json.dumps(answer), flush=True)


def _alive(client: Any) -> dict[str, Any]:
    infos = client.get_all_node_info(timeout=10)
    return {node.hex(): info for node, info in infos.items() if info.state == ALIVE}


if __name__ == "__main__":
    main()
