"""What runs on each node while a cluster is examined: an actor that looks around, lets itself be reached, and tries storage and torch."""

import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from undula.cluster.facts import Gpu, Look, NoticeSource, Room, Stored
from undula.cluster.notices import Unreadable, ask, source_here
from undula.errors import ClusterError, StorageError
from undula.storage import open_store

PACKAGES = ("ray", "torch", "undula", "pyarrow", "horovod")
OUR_BUILD = re.compile(r"/horovod-[^/]*-([0-9a-f]{8})-torch-[^/]*/")
"""The folder of a wheel of `undula build-horovod`, as pip notes it of what it has installed (PEP 610)."""
LEFT = "left"
STORED_BYTES = 16 * 2**20
"""Enough for a rate, and little to pay for."""
CONNECT_TIMEOUT_S = 3.0
CONNECTIONS_AT_ONCE = 32


class Probe:
    """One node's. Several methods may run at once, so that one that hangs holds up no other."""

    def look(self, session: str, runs: str) -> Look:
        """What this node has.

        Args:
            session: Ray's directory for it.
            runs: path or URL of the run directories.
        """
        # Both import torch, which takes seconds: the driver, which needs none of it, imports this module as well.
        from undula.cluster.worker_check import gpus_seen
        from undula.recovery.snapshot import MEMORY

        versions = {"Python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
        paths = [session] if "://" in runs else [session, runs]
        rooms = {_existing(path).stat().st_dev: _room(path) for path in paths}
        return Look(versions, *gpus_seen(), tuple(rooms.values()), _room(str(MEMORY)), _notice_source())

    def gpus(self) -> tuple[Gpu, ...]:
        from undula.cluster.worker_check import try_gpus

        return tuple(Gpu(*found) for found in try_gpus())

    def clock(self) -> float:
        """Seconds since the epoch, by this node."""
        return time.time()

    def ask_dashboard(self, address: str) -> int | None:
        """The status with which the dashboard answers who has no token. Asked on the head, where alone it may listen."""
        try:
            return ask(f"http://{address}/api/version", {})[0]
        except Unreadable:
            return None

    def listen(self) -> int:
        """Accept connections from now on; the port."""
        self._listener = socket.create_server(("", 0), backlog=1024)  # the kernel accepts them
        return int(self._listener.getsockname()[1])

    def reach(self, peers: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """Connect to the addresses of other nodes, by id: what went wrong, where something did."""
        with ThreadPoolExecutor(CONNECTIONS_AT_ONCE) as pool:
            problems = zip(peers, pool.map(_connection_problem, peers.values()), strict=True)
            return {peer: problem for peer, problem in problems if problem}

    def free_port(self) -> int:
        with socket.create_server(("", 0)) as listener:
            return int(listener.getsockname()[1])

    def leave(self, url: str, ours: bytes) -> str | None:
        """Leave a file for all nodes to find; what went wrong, where something did."""
        try:
            open_store(url).write(LEFT, ours)
        except StorageError as error:
            return str(error)
        return None

    def store(self, url: str, name: str, ours: bytes) -> Stored:
        """Write a file, read it back and delete it; and look for the one that another node has left.

        Args:
            url: of a folder that is there for this examination alone.
            name: of the file.
            ours: what was left.
        """
        data = os.urandom(STORED_BYTES)
        try:
            store = open_store(url)
            started = time.perf_counter()
            store.write(name, data)
            written = time.perf_counter()
            back = store.read(name)
            read = time.perf_counter()
            store.delete(name)
            if back != data:
                return Stored(problem=f"what was written to {url} came back otherwise")
        except StorageError as error:
            return Stored(problem=str(error))
        sees_ours = False
        with suppress(StorageError):
            sees_ours = store.read(LEFT) == ours
        return Stored(len(data), written - started, read - written, sees_ours)

    def clean(self, url: str) -> None:
        """Delete the folder."""
        with suppress(StorageError):
            open_store(url).delete("")

    def all_reduce(
        self, backend: str, address: str, port: int, rank: int, world_size: int, timeout_s: float
    ) -> tuple[float, float]:
        """Seconds for one number, and bytes per second."""
        from undula.cluster.worker_check import time_all_reduce

        return time_all_reduce(backend, address, port, rank, world_size, timeout_s)


def _version(package: str) -> str | None:
    """Of `undula build-horovod` with what it changes, as ranks of its Horovod and of another must not meet: 0.28.1+undula.a392a507."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return None
    build = OUR_BUILD.search(found.read_text("direct_url.json") or "")
    return f"{found.version}+undula.{build[1]}" if build else found.version


def _existing(path: str) -> Path:
    """The path, or the folder in which it would be made."""
    found = Path(path)
    while not found.exists() and found != found.parent:
        found = found.parent
    return found


def _room(path: str) -> Room:
    usage = shutil.disk_usage(_existing(path))
    return Room(path, usage.free, usage.total)


def _notice_source() -> NoticeSource:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return NoticeSource(in_pod=True)
    try:
        source = source_here()
    except ClusterError:
        return NoticeSource()
    try:
        notice = source.poll()
    except Unreadable as error:
        return NoticeSource(source.name, problem=str(error))
    return NoticeSource(source.name, notice=notice.reason if notice else None)


def _connection_problem(where: tuple[str, int]) -> str | None:
    try:
        socket.create_connection(where, timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return f"{error.strerror or error} at port {where[1]}"
    return None
