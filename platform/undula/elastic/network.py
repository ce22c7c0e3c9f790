"""Network interface of a node over which its workers reach those of other nodes, and the test that they do.

By default it is the one with the address under which Ray knows the node, which all nodes reach. Gloo would take the address of the node's
name, which is often that of the loopback, and NCCL any interface.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import psutil
import ray

from undula.errors import ClusterError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
CONNECT_LIMIT_S = 5.0
"""Maximum seconds in which a rank reaches the next one."""
Interfaces: TypeAlias = Mapping[str, Sequence[Any]]
"""Addresses of each network interface, as `psutil.net_if_addrs` returns them."""
FAMILIES = (socket.AF_INET, socket.AF_INET6)


def node_address() -> str:
    """Return the address under which Ray knows this node."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def use_interface(wanted: Sequence[str] | None, address: str) -> None:
    """Let gloo and NCCL use an interface in all process groups that this process makes from now on.

    Args:
        wanted: Names of interfaces. Gloo uses the first of them that this node has, and NCCL all of them. By default, both use the one
            with `address`, unless the environment variables for it are set.
        address: Address under which Ray knows this node.

    Raises:
        ClusterError: This node has none of the wanted interfaces.
    """
    here = psutil.net_if_addrs()
    if wanted:
        os.environ[GLOO] = first_of(wanted, "workers.interfaces", here)
        os.environ[NCCL] = f"={','.join(wanted)}"
    elif name := interface_with(address, here):
        os.environ.setdefault(GLOO, name)
        os.environ.setdefault(NCCL, f"={name}")


def first_of(wanted: Sequence[str], setting: str, here: Interfaces) -> str:
    """Return the first of the wanted interfaces that this node has.

    Raises:
        ClusterError: It has none of them.
    """
    if found := [name for name in wanted if name in here]:
        return found[0]
    missing = f"this node has no network interface {' or '.join(wanted)}"
    raise ClusterError(f"{missing}; set {setting} to interfaces of all nodes (here: {', '.join(sorted(here))})")


def interface_with(address: str, here: Interfaces) -> str | None:
    """Return the interface with an address; None if there is none, as behind a router that translates addresses."""
    return next((name for name, all_of in here.items() if address in [own.address for own in all_of]), None)


def gloo_address() -> tuple[str, str]:
    """Return the address at which gloo listens in this process, and what it is the address of, for messages."""
    name = os.environ.get(GLOO, "").partition(",")[0]
    if name:
        own = [
            each.address.partition("%")[0] for each in psutil.net_if_addrs().get(name, ()) if each.family in FAMILIES
        ]
        return next(iter(own), ""), f"of the interface {name}"
    host = socket.gethostname()
    with suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]), f"of the name {host}"
    return "127.0.0.1", "of the loopback"


def check_connection(store: Any, rank: int, world_size: int, node: str) -> None:
    """Check that each rank reaches the next one at the address where gloo listens. All ranks of a group must call this together.

    Args:
        store: Store of the group.
        rank: Rank of this process.
        world_size: Number of ranks.
        node: Name of this node, for messages.

    Raises:
        ClusterError: A rank does not reach the next one.
    """
    address, what = gloo_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:  # the kernel accepts the connections
        store.set(f"at/{rank}", json.dumps([address, listener.getsockname()[1], f"{what} of node {node}"]))
        host, port, whose = json.loads(store.get(f"at/{(rank + 1) % world_size}"))
        problem = ""
        try:
            socket.create_connection((host, port), timeout=CONNECT_LIMIT_S).close()
        except OSError as error:
            problem = (
                f"node {node} does not reach {host}, the address {whose}: {error.strerror or error}; set workers.interfaces to the network "
                f"interfaces that connect the nodes (here: {', '.join(sorted(psutil.net_if_addrs()))})"
            )
        store.set(f"reaches/{rank}", problem)
        problems = store.multi_get([f"reaches/{other}" for other in range(world_size)])
    if found := [each.decode() for each in problems if each]:
        raise ClusterError(found[0])
