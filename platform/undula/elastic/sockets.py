"""Shutdown of the TCP connections of collectives, so that threads that wait for a lost rank raise an exception.

This is necessary because neither gloo nor the rendezvous through a store can be aborted. One end of each of torch's connections belongs to
a port on which its process listens. If each rank shuts down the connections that it has accepted, every connection of the group ends,
whichever rank is lost. Horovod's sockets no longer listen once the group runs, so they are identified by name.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OPEN_FILES = Path("/proc/self/fd")


def listening_ports() -> frozenset[int]:
    """Return the TCP ports on which this process listens."""
    return frozenset(stream.getsockname()[1] for _, stream in _stream_sockets() if _listens(stream))


def cut_connections(ports: frozenset[int]) -> None:
    """Shut down the connections that this process has accepted on these ports, so that threads that read from them raise."""
    for _, stream in _stream_sockets():
        # gloo ends the process when a listening socket fails.
        if stream.getsockname()[1] in ports and not _listens(stream):
            _cut(stream)


def open_sockets() -> frozenset[str]:
    """Return the names of this process's TCP sockets. A name is unique while its socket is open."""
    return frozenset(name for name, _ in _stream_sockets())


def cut_sockets(names: frozenset[str]) -> None:
    """Shut down the connections of those sockets with these names that are still open."""
    for name, stream in _stream_sockets():
        if name in names and not _listens(stream):
            _cut(stream)


def _cut(stream: socket.socket) -> None:
    with suppress(OSError):  # the connection has already ended
        stream.shutdown(socket.SHUT_RDWR)


def _listens(stream: socket.socket) -> bool:
    return bool(stream.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _stream_sockets() -> Iterator[tuple[str, socket.socket]]:
    for file in OPEN_FILES.iterdir() if OPEN_FILES.is_dir() else []:
        with suppress(OSError):  # the file was closed in the meantime, or is not a socket
            if not (name := str(file.readlink())).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as stream:
                if stream.family in (socket.AF_INET, socket.AF_INET6) and stream.type == socket.SOCK_STREAM:
                    yield name, stream
