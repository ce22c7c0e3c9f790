"""What an examination of a cluster found out, as plain values: the probes on its nodes fill them in, and the doctor judges them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """A node that Ray takes for alive."""

    id: str
    address: str
    cpus: float
    gpus: float
    is_head: bool = False
    is_spot: bool = False
    """It has the label undula.io/market: spot."""

    @property
    def trains(self) -> bool:
        """Whether Ray may place workers on it."""
        return self.cpus > 0 or self.gpus > 0

    @property
    def name(self) -> str:
        """As `ray list nodes` lets one find it."""
        return f"{'the head ' if self.is_head else ''}{self.address} ({self.id[:8]})"


@dataclass(frozen=True)
class Room:
    """A file system."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class NoticeSource:
    """Where a node's notices come from."""

    name: str | None = None
    """None for a machine of no cloud that is known, and in a pod."""
    problem: str | None = None
    notice: str | None = None
    """One that is there now."""
    in_pod: bool = False
    """In Kubernetes, where a notice is the pod's end, and the machine's metadata are not for pods."""


@dataclass(frozen=True)
class Look:
    """What a node tells of itself."""

    versions: Mapping[str, str | None]
    """By package; None where it is not installed."""
    gpus_seen: int
    """By torch."""
    cuda: str | None
    """The version that torch is built with."""
    rooms: tuple[Room, ...]
    """Disks that a run writes to."""
    memory: Room
    """Where snapshots are kept."""
    notices: NoticeSource


@dataclass(frozen=True)
class Gpu:
    """A GPU that was made to multiply two matrices."""

    name: str
    problem: str | None = None
    is_full: bool = False
    """It has no memory left, which says nothing of its health."""


@dataclass(frozen=True)
class Clock:
    """A node's clock beside ours."""

    offset_s: float
    """Positive where it is ahead."""
    round_trip_s: float
    """Of the fastest question; half of it is how much the offset may be wrong."""


@dataclass(frozen=True)
class Unreached:
    """A TCP connection that could not be made."""

    source: str
    """A node's id."""
    target: str
    problem: str


@dataclass(frozen=True)
class Stored:
    """A file that a node wrote, read back and deleted."""

    bytes: int = 0
    write_s: float = 0.0
    read_s: float = 0.0
    sees_ours: bool = True
    """Whether it found there what the first node, the head, had written."""
    problem: str | None = None


@dataclass(frozen=True)
class AllReduce:
    """Gradients' way between nodes, one process on each."""

    nodes: tuple[str, ...]
    """Their ids; fewer than two are not measured."""
    backend: str
    latency_s: float = 0.0
    """Of one number: the median."""
    bytes_per_s: float = 0.0
    """Bytes of the tensor by the time that it takes: the algorithm's bandwidth."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """By node's id."""


@dataclass(frozen=True)
class Facts:
    """All of it; mappings are by a node's id, without those of which it is not known."""

    runs: str
    nodes: tuple[Node, ...]
    silent: Mapping[str, str] = field(default_factory=dict)
    """Why nothing, or nothing more, is known of a node."""
    looks: Mapping[str, Look] = field(default_factory=dict)
    gpus: Mapping[str, tuple[Gpu, ...]] = field(default_factory=dict)
    clocks: Mapping[str, Clock] = field(default_factory=dict)
    unreached: tuple[Unreached, ...] = ()
    stored: Mapping[str, Stored] = field(default_factory=dict)
    all_reduce: AllReduce | None = None
    dashboard_status: int | None = None
    """HTTP status with which the dashboard answers who has no token; None where it does not answer."""
    unmeasured: tuple[str, ...] = ()
    """Checks that there was no time left for, in whole or in part."""

    def node(self, id: str) -> Node:
        return next(node for node in self.nodes if node.id == id)
