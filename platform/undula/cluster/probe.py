"""Actor that runs on each node during an examination. It reports the node's state and tests connections, storage and torch."""

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

from undula.cluster.facts import FileSystem, Gpu, NodeReport, NoticeSource, Stored
from undula.cluster.notices import Unreadable, ask, source_here
from undula.errors import ClusterError, StorageError
from undula.state.defaults import MEMORY
from undula.storage import open_store

PACKAGES = ("ray", "torch", "undula", "pyarrow", "horovod")
OUR_BUILD = re.compile(r"/horovod-[^/]*-([0-9a-f]{8})-torch-[^/]*/")
"""Pattern of the path of a wheel from `undula build-horovod`. pip records this path when it installs the wheel (PEP 610)."""
LEFT = "left"
"""Name of the file that one node writes and all nodes must see."""
STORED_BYTES = 16 * 2**20
"""Size in bytes of the file that measures the storage; large enough to measure a rate, but cheap."""
CONNECT_TIMEOUT_S = 3.0
CONNECTIONS_AT_ONCE = 32


class Probe:
    """Probe of one node. Its methods can run concurrently, so that a method that hangs does not block the others."""

    def report(self, session: str, runs: str) -> NodeReport:
        """Report the software, GPUs, disks and spot notices of this node.

        Args:
            session: Ray's session directory on this node.
            runs: Path or URL of the run directories.
        """
        # worker_check imports torch, which takes seconds. The driver imports this module too, but does not need torch.
        from undula.cluster.worker_check import gpus_seen

        versions = {"Python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
        paths = [session] if "://" in runs else [session, runs]
        disks = {_existing(path).stat().st_dev: _file_system(path) for path in paths}
        return NodeReport(versions, *gpus_seen(), tuple(disks.values()), _file_system(str(MEMORY)), _notice_source())

    def gpus(self) -> tuple[Gpu, ...]:
        """Test all GPUs of this node."""
        from undula.cluster.worker_check import try_gpus

        return tuple(Gpu(*result) for result in try_gpus())

    def clock(self) -> float:
        """Return this node's time in seconds since the epoch."""
        return time.time()

    def ask_dashboard(self, address: str) -> int | None:
        """Return the HTTP status of the dashboard's answer to a request without a token, or None without an answer.

        Call this on the head, because the dashboard may listen there only.
        """
        try:
            return ask(f"http://{address}/api/version", {})[0]
        except Unreadable:
            return None

    def listen(self) -> int:
        """Start accepting connections and return the port."""
        self._listener = socket.create_server(("", 0), backlog=1024)  # the kernel accepts the connections
        return int(self._listener.getsockname()[1])

    def reach(self, peers: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """Connect to other nodes, given their addresses by node id, and return the problems by node id."""
        with ThreadPoolExecutor(CONNECTIONS_AT_ONCE) as pool:
            problems = zip(peers, pool.map(_connection_problem, peers.values()), strict=True)
            return {peer: problem for peer, problem in problems if problem}

    def free_port(self) -> int:
        """Return a port that is free now."""
        with socket.create_server(("", 0)) as listener:
            return int(listener.getsockname()[1])

    def leave(self, url: str, ours: bytes) -> str | None:
        """Write the file that all nodes must see. Return the problem, or None on success."""
        try:
            open_store(url).write(LEFT, ours)
        except StorageError as error:
            return str(error)
        return None

    def store(self, url: str, name: str, ours: bytes) -> Stored:
        """Write a file, read it back and delete it, and look for the file that another node has written with `leave`.

        Args:
            url: URL of a folder that only this examination uses.
            name: Name of the file.
            ours: Expected content of the other node's file.
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
                return Stored(problem=f"a file in {url} had other content when it was read back")
        except StorageError as error:
            return Stored(problem=str(error))
        sees_ours = False
        with suppress(StorageError):
            sees_ours = store.read(LEFT) == ours
        return Stored(len(data), written - started, read - written, sees_ours)

    def clean(self, url: str) -> None:
        """Delete the folder of the examination."""
        with suppress(StorageError):
            open_store(url).delete("")

    def all_reduce(
        self, backend: str, address: str, port: int, rank: int, world_size: int, timeout_s: float
    ) -> tuple[float, float]:
        """Take part in an all-reduce and return the time in seconds for one number, and the rate in bytes per second."""
        from undula.cluster.worker_check import time_all_reduce
        from undula.elastic.network import node_address, use_interface

        use_interface(None, node_address())
        return time_all_reduce(backend, address, port, rank, world_size, timeout_s)


def _version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed.

    A Horovod from `undula build-horovod` has the digest of its patch in the version, such as 0.28.1+undula.a392a507. Ranks with different
    builds of Horovod must not train together.
    """
    try:
        installed = distribution(package)
    except PackageNotFoundError:
        return None
    build = OUR_BUILD.search(installed.read_text("direct_url.json") or "")
    return f"{installed.version}+undula.{build[1]}" if build else installed.version


def _existing(path: str) -> Path:
    """Return the path, or its nearest parent that exists."""
    nearest = Path(path)
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    return nearest


def _file_system(path: str) -> FileSystem:
    usage = shutil.disk_usage(_existing(path))
    return FileSystem(path, usage.free, usage.total)


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
