"""Drivers that are forks of the head's fork server."""

from dataclasses import replace
from pathlib import Path

from undula.cluster.forking.interpreter import DRIVER_SOCKET
from undula.cluster.local import LocalCluster


def with_forked_drivers(cluster: LocalCluster) -> LocalCluster:
    """Return a cluster whose environment variables let `cluster.python SCRIPT` run the script as a driver in a fork."""
    return replace(
        cluster, env={**cluster.env, DRIVER_SOCKET: str(Path(cluster.python).parent / str(cluster.process.pid))}
    )
