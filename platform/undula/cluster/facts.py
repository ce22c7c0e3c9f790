"""Results of examining a cluster, as plain values. Probes on the nodes collect them, and the doctor evaluates them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NodeFacts:
    """Node that Ray considers alive."""

    id: str
    address: str
    cpus: float
    gpus: float
    is_head: bool = False
    is_spot: bool = False
    """Whether the node has the label undula.io/market: spot."""
    free_gpus: float = 0.0
    """Number of GPUs that no process has reserved."""
    num_workers: int = 0
    """Number of workers of jobs on the node."""

    @property
    def trains(self) -> bool:
        """Whether Ray can place workers on the node."""
        return self.cpus > 0 or self.gpus > 0

    @property
    def name(self) -> str:
        """Address and short id of the node, as `ray list nodes` shows them."""
        return f"{'the head ' if self.is_head else ''}{self.address} ({self.id[:8]})"


@dataclass(frozen=True)
class FileSystem:
    """Space on a file system."""

    path: str
    """Path of a file or folder on the file system."""
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class NoticeSource:
    """Source of a node's spot notices."""

    name: str | None = None
    """Name of the source; None on a machine of an unknown cloud and in a pod."""
    problem: str | None = None
    """Reason why the source cannot be read; None if it can."""
    notice: str | None = None
    """Notice that the node has now."""
    in_pod: bool = False
    """Whether the node is a Kubernetes pod. Its notice is the start of its termination, which a preStop hook passes on to Ray."""


@dataclass(frozen=True)
class NodeReport:
    """Software, GPUs, disks and spot notices of a node, as its probe reports them."""

    versions: Mapping[str, str | None]
    """Version of each package; None for a package that is not installed."""
    gpus_seen: int
    """Number of GPUs that torch sees."""
    cuda: str | None
    """Version of CUDA that torch was built with; None for a build without CUDA."""
    disks: tuple[FileSystem, ...]
    """Disks that a run writes to."""
    memory: FileSystem
    """Shared memory, which holds snapshots."""
    notices: NoticeSource


@dataclass(frozen=True)
class Gpu:
    """Result of multiplying two matrices on a GPU."""

    name: str
    problem: str | None = None
    """Reason why the multiplication failed; None if it succeeded."""
    is_full: bool = False
    """Whether the multiplication failed only because the GPU has no free memory, which does not indicate a defect."""


@dataclass(frozen=True)
class Clock:
    """Clock of a node compared with the clock of this machine."""

    offset_s: float
    """Offset of the node's clock in seconds; positive if it is ahead."""
    round_trip_s: float
    """Duration in seconds of the fastest request. The offset is accurate to half of it."""


@dataclass(frozen=True)
class FailedConnection:
    """TCP connection between two nodes that failed."""

    source: str
    """Id of the connecting node."""
    target: str
    """Id of the node that was not reached."""
    problem: str
    """Reason why the connection failed."""


@dataclass(frozen=True)
class Stored:
    """Result of writing a file to the storage from a node, reading it back and deleting it."""

    bytes: int = 0
    """Size of the file in bytes."""
    write_s: float = 0.0
    """Duration of the write in seconds."""
    read_s: float = 0.0
    """Duration of the read in seconds."""
    sees_ours: bool = True
    """Whether the node sees the file that the first node, usually the head, has written."""
    problem: str | None = None
    """Reason why the test failed; None if it succeeded."""


@dataclass(frozen=True)
class AllReduce:
    """Result of an all-reduce between nodes, with one process on each."""

    nodes: tuple[str, ...]
    """Ids of the nodes. With fewer than two nodes, nothing is measured."""
    backend: str
    latency_s: float = 0.0
    """Median time in seconds to reduce one number."""
    bytes_per_s: float = 0.0
    """Size of a large tensor divided by the time to reduce it (algorithm bandwidth), in bytes per second."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Problems by node id."""


@dataclass(frozen=True)
class Facts:
    """All results of an examination. Mappings have node ids as keys and lack the nodes without a result."""

    runs: str
    """Path or URL of the run directories."""
    nodes: tuple[NodeFacts, ...]
    unresponsive: Mapping[str, str] = field(default_factory=dict)
    """Nodes that stopped answering, with the reason."""
    reports: Mapping[str, NodeReport] = field(default_factory=dict)
    gpus: Mapping[str, tuple[Gpu, ...]] = field(default_factory=dict)
    clocks: Mapping[str, Clock] = field(default_factory=dict)
    failed_connections: tuple[FailedConnection, ...] = ()
    stored: Mapping[str, Stored] = field(default_factory=dict)
    all_reduce: AllReduce | None = None
    dashboard_status: int | None = None
    """HTTP status of the dashboard's answer to a request without a token; None if it does not answer."""
    unmeasured: tuple[str, ...] = ()
    """Checks that are incomplete because no time was left for them."""

    def node(self, id: str) -> NodeFacts:
        """Return the node with this id."""
        return next(node for node in self.nodes if node.id == id)
