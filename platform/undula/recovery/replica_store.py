"""Store of replicas in the memory of the controller, on the node that outlives all others."""

from dataclasses import dataclass, field, replace

from undula.recovery.snapshot import NEVER, Age, available_memory, parsed
from undula.state.defaults import FREE_SHARE
from undula.state.extents import Extent, are_complete


@dataclass(frozen=True)
class Replica:
    """Snapshot of a rank as it was sent. Its description stays in bytes. Parsed, the descriptions of many ranks are so many objects that
    Python's garbage collector would hold up the process for seconds.
    """

    age: Age
    meta: bytes
    data: bytearray
    extent: tuple[Extent, tuple[str, ...]] | None
    """Extent of the rank's pieces and the names of the tensors; None if the rank held the whole state."""

    @classmethod
    def of(cls, meta: bytes, data: bytearray) -> "Replica":
        """Return the replica with a description and bytes that were received."""
        snapshot = parsed(meta, data)
        holding = snapshot.holding
        return cls(snapshot.age, meta, data, None if holding is None else Extent.of(holding))


@dataclass
class _State:
    """Parts of a state that have arrived."""

    age: Age = NEVER
    parts: dict[str, Replica] = field(default_factory=dict)
    """Replicas by sender."""
    names: dict[bytes, tuple[str, ...]] = field(default_factory=dict)
    """Names of the tensors by digest, which all replicas share."""

    @property
    def bytes(self) -> int:
        return sum(len(part.data) for part in self.parts.values())


@dataclass
class ReplicaStore:
    """Keeps the newest complete state, and beside it the parts of one newer state that have arrived.

    A state is admitted or refused as a whole when its first part is offered, so a refused state takes no memory. The complete state stays
    until a newer one is complete. If there is no room for both, the run has no replicas in the background at all, because the only one
    would get older and older.
    """

    _whole: _State = field(default_factory=_State)
    """Newest complete state; without parts if there is none."""
    _incoming: _State = field(default_factory=_State)
    """Newest state of which parts were admitted."""
    refused: Age = NEVER
    """Age of the last state for which there was no room."""

    @property
    def newest_whole(self) -> Age:
        """Age of the newest complete state; NEVER if there is none."""
        return self._whole.age

    def budget(self) -> int:
        """Return the number of bytes that all states may take: half of the memory that would be free on this node without them."""
        return int(FREE_SHARE * (available_memory() + self._whole.bytes + self._incoming.bytes))

    def room(self) -> int:
        """Return the number of bytes that a state may take beside the newest complete one."""
        return self.budget() - self._whole.bytes

    def admits(self, age: Age, state_bytes: int) -> bool:
        """Return whether the parts of a state may be stored. The answer is the same for all parts.

        Args:
            age: Age of the state.
            state_bytes: Size of all parts of the state in bytes. A newer state of this size will follow, and there must be room for both.
        """
        if self._is_superseded(age) or age == self.refused:
            return False
        if age == self._incoming.age:
            return True
        if state_bytes > self.room() or 2 * state_bytes > self.budget():
            self.refused = age
            return False
        self._incoming = _State(age)
        return True

    def keep(self, sender: str, replica: Replica, senders: int = 1) -> bool:
        """Store the replica of a rank's snapshot, and drop states that are no longer needed.

        Args:
            sender: Name of the rank.
            replica: The replica.
            senders: Number of ranks that send parts of the state. It is not checked for completeness before all parts are there.

        Returns:
            False if a newer state has come in the meantime.
        """
        if self._is_superseded(replica.age):
            return False
        if replica.age != self._incoming.age:
            self._incoming = _State(replica.age)
        parts, names = self._incoming.parts, self._incoming.names
        if replica.extent is not None:
            extent, own = replica.extent
            replica = replace(replica, extent=(extent, names.setdefault(extent.names, own)))
        parts[sender] = replica
        is_due = replica.extent is None or len(parts) >= senders
        if is_due and are_complete(part.extent for part in parts.values()):
            self._whole, self._incoming = self._incoming, _State()
        return True

    def share(self, rank: int, world_size: int) -> list[Replica]:
        """Return the replicas that one rank fetches. All ranks together fetch everything in the store."""
        return [*self._whole.parts.values(), *self._incoming.parts.values()][rank::world_size]

    def _is_superseded(self, age: Age) -> bool:
        return age <= self._whole.age or age < self._incoming.age
