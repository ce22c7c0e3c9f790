"""Store of replicas in the memory of the controller, on the node that outlives all others."""

from dataclasses import dataclass, field

from undula.recovery.snapshot import NEVER, Age, Snapshot, available_memory
from undula.state.defaults import FREE_SHARE
from undula.state.pieces import Holding, is_complete


@dataclass
class _State:
    """Parts of a state that have arrived."""

    age: Age = NEVER
    parts: dict[str, Snapshot] = field(default_factory=dict)
    """Snapshots by sender."""
    holdings: dict[str, Holding | None] = field(default_factory=dict)
    """Extent of each sender's pieces."""

    @property
    def bytes(self) -> int:
        return sum(len(part.load_bytes()) for part in self.parts.values())


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

    def keep(self, sender: str, snapshot: Snapshot) -> bool:
        """Store the snapshot that a rank has sent, and drop states that are no longer needed.

        Returns:
            False if a newer state has come in the meantime.
        """
        if self._is_superseded(snapshot.age):
            return False
        if snapshot.age != self._incoming.age:
            self._incoming = _State(snapshot.age)
        self._incoming.parts[sender] = snapshot
        self._incoming.holdings[sender] = snapshot.holding
        if is_complete(self._incoming.holdings.values()):
            self._whole, self._incoming = self._incoming, _State()
        return True

    def share(self, rank: int, world_size: int) -> list[Snapshot]:
        """Return the snapshots that one rank fetches. All ranks together fetch everything in the store."""
        return [*self._whole.parts.values(), *self._incoming.parts.values()][rank::world_size]

    def _is_superseded(self, age: Age) -> bool:
        return age <= self._whole.age or age < self._incoming.age
