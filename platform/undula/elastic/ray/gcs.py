"""Client of a cluster's head that runs in a separate process. It queries nodes and actors, and drains nodes.

The process, `python -m undula.elastic.ray.gcs ADDRESS`, reads one command per line from stdin and writes one JSON answer per line to
stdout. It is necessary because Ray reads a cluster's token only once in the life of a process, and waits forever for a head that accepts a
connection but does not answer.
"""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from ipaddress import ip_address
from typing import Any

import psutil

from undula.errors import ClusterError

PREEMPTION = 2
"""DRAIN_NODE_REASON_PREEMPTION of Ray's autoscaler.proto."""
ALIVE = 0
"""GcsNodeInfo.ALIVE of Ray's gcs.proto."""
START_LIMIT_S = 30.0
"""Seconds to import Ray in, or the limit of an answer if that is longer. The import takes 4 s while a job uses all cores."""
ANSWER_LIMIT_S = 5.0
"""Default time limit for an answer in seconds."""
HELLO = "hello"
"""Command that the process answers without a query to the head."""
IP = (socket.AF_INET, socket.AF_INET6)
LAST_MS = 10**14
"""Latest accepted deadline in milliseconds since the epoch. A later one must be a mistake, although Ray accepts any value of 64 bits."""


class Head:
    """Head of a cluster, queried through a separate process. A process that does not answer a query is replaced.

    Args:
        address: Address of the head; `auto` for the cluster that this machine belongs to.
        env: Environment of the process, with the cluster's token.
        limit_s: Maximum seconds for an answer.
    """

    def __init__(self, address: str, env: Mapping[str, str], limit_s: float = ANSWER_LIMIT_S):
        self._address, self._env, self._limit_s = address, dict(env), limit_s
        self._asking = threading.Lock()
        self._is_new = True
        self._is_closed = False
        self._process = self._started()

    def ask(self, command: str) -> Any:
        """Send a command to the head and return its answer.

        Raises:
            ClusterError: The head does not answer in time.
        """
        with self._asking:
            if self._process.poll() is not None and not self._is_closed:
                self._process.communicate()
                self._process, self._is_new = self._started(), True
            if self._is_new:
                self._is_new = not self._line(HELLO, max(START_LIMIT_S, self._limit_s))
            try:
                return json.loads(self._line(command, self._limit_s))
            except ValueError:
                self._process.kill()  # otherwise a late answer would be taken for the answer to the next query
                self._process.wait()
                raise ClusterError(f"the head of the cluster at {self._address} does not answer") from None

    def drain(self, node: str, deadline: float | None) -> None:
        """Give a node notice that it will be removed.

        Args:
            node: Id of the node.
            deadline: Time at which it is removed, in seconds since the epoch; None if it is not known.

        Raises:
            ClusterError: The cluster does not accept the notice.
        """
        deadline_ms = (deadline or 0.0) * 1e3
        if not 0 <= deadline_ms < LAST_MS:
            raise ClusterError(
                f"node {node[:8]} cannot be drained: the deadline {deadline} is not a time in seconds since the epoch"
            )
        answer = self.ask(f"drain {node} {int(deadline_ms)}")
        accepted, why = answer if isinstance(answer, list) and len(answer) == 2 else (False, answer)
        if not accepted:
            raise ClusterError(f"node {node[:8]} cannot be drained: {why}")

    def close(self) -> None:
        """End the process."""
        self._is_closed = True
        self._process.kill()
        self._process.communicate()

    def _started(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "undula.elastic.ray.gcs", self._address],
            env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def _line(self, command: str, limit_s: float) -> str:
        """Send a command and return the answer, which is empty if the process has ended or does not answer in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = threading.Timer(limit_s, self._process.kill)
        limit.start()
        try:
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except (OSError, ValueError):  # the process has ended, or was closed
            return ""
        finally:
            limit.cancel()


def main() -> None:
    raylet: Any = import_module("ray._raylet")
    for module in ("ray._private.services", "ray._private.state", "ray.util"):
        import_module(module)
    client: Any = None
    state: Any = None
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == HELLO:
            answer: Any = True
        else:
            if client is None:
                client, state = _connected(raylet, sys.argv[1])
            answer = _answer(client, state, command, arguments)
        print(json.dumps(answer), flush=True)


def _connected(raylet: Any, address: str) -> tuple[Any, Any]:
    if address == "auto":
        address = import_module("ray._private.services").canonicalize_bootstrap_address_or_die(address)
    state: Any = import_module("ray._private.state").GlobalState()
    options = raylet.GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    state._initialize_global_state(options)
    return raylet.GcsClient(address=address), state


def _answer(client: Any, state: Any, command: str, arguments: list[str]) -> Any:
    match command:
        case "alive":
            return list(_addresses(client))
        case "here":
            raylets, own = set(import_module("ray._private.services").find_node_ids()), own_addresses()
            return [node for node, address in _addresses(client).items() if node in raylets or address in own]
        case "addresses":
            return _addresses(client)
        case "count":
            groups = [group for group in state.placement_group_table().values() if group["state"] != "REMOVED"]
            return {"actors": len(state.actor_table(None, None, "ALIVE")), "placement groups": len(groups)}
        case "drain":
            node, deadline_ms = arguments
            return client.drain_node(node, PREEMPTION, "spot", int(deadline_ms))
        case _:
            raise ValueError(f"unknown command {command!r}")


def _addresses(client: Any) -> dict[str, str]:
    """Return the address under which Ray knows each node that is alive, by node id."""
    infos = client.get_all_node_info(timeout=10)
    return {node.hex(): str(info.node_manager_address) for node, info in infos.items() if info.state == ALIVE}


def own_addresses() -> set[str]:
    """Return the IP addresses of this machine's network interfaces, except for the loopback's, which every machine has."""
    interfaces = psutil.net_if_addrs().values()
    found = {each.address.partition("%")[0] for all_of in interfaces for each in all_of if each.family in IP}
    return {address for address in found if not ip_address(address).is_loopback}


if __name__ == "__main__":
    main()
