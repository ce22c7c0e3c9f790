"""Wakes threads that wait for ranks that have left: gloo has no abort, and a store's rendezvous none either.

Both connect their ranks through sockets. Torch's listen on one side: where each rank cuts the connections that it has accepted, every
connection of the group is cut, whichever rank is the one that is gone. Horovod's have stopped to listen by then, and are known by name.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OPEN_FILES = Path("/proc/self/fd")


def listening_ports() -> frozenset[int]:
    """TCP ports that this process listens on."""
    return frozenset(each.getsockname()[1] for _, each in _stream_sockets() if _listens(each))


def cut_connections(ports: frozenset[int]) -> None:
    """End the connections that this process has accepted on some ports; whoever waits there gets an error."""
    for _, each in _stream_sockets():
        if each.getsockname()[1] in ports and not _listens(each):  # gloo ends the process where it cannot listen
            _cut(each)


def open_sockets() -> frozenset[str]:
    """Names of this process's TCP sockets, none of which is used again while it is open."""
    return frozenset(name for name, _ in _stream_sockets())


def cut_sockets(names: frozenset[str]) -> None:
    """End the connections of some sockets, where they are open."""
    for name, each in _stream_sockets():
        if name in names and not _listens(each):
            _cut(each)


def _cut(each: socket.socket) -> None:
    with suppress(OSError):  # at its end already
        each.shutdown(socket.SHUT_RDWR)


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _stream_sockets() -> Iterator[tuple[str, socket.socket]]:
    for file in OPEN_FILES.iterdir() if OPEN_FILES.is_dir() else []:
        with suppress(OSError):  # closed meanwhile, or no socket
            if not (name := str(file.readlink())).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield name, found
