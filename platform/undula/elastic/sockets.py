"""Wakes threads that wait for ranks that have left: gloo has no abort, and a store's rendezvous none either.

Both connect their ranks through sockets that one side listens on. Where each rank cuts the connections that it has accepted, every
connection of the group is cut, whichever rank is the one that is gone.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OPEN_FILES = Path("/proc/self/fd")


def listening_ports() -> frozenset[int]:
    """TCP ports that this process listens on."""
    return frozenset(each.getsockname()[1] for each in _stream_sockets() if _listens(each))


def cut_connections(ports: frozenset[int]) -> None:
    """End the connections that this process has accepted on some ports; whoever waits there gets an error."""
    for each in _stream_sockets():
        if each.getsockname()[1] in ports and not _listens(each):  # gloo ends the process where it cannot listen
            with suppress(OSError):  # at its end already
                each.shutdown(socket.SHUT_RDWR)


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _stream_sockets() -> Iterator[socket.socket]:
    for file in OPEN_FILES.iterdir() if OPEN_FILES.is_dir() else []:
        with suppress(OSError):  # closed meanwhile, or no socket
            if not str(file.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found
