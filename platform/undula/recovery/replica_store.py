"""Store of replicas in the memory of the controller, on the node that outlives all others."""

from dataclasses import dataclass, field

from undula.recovery.snapshot import FREE_SHARE, NEVER, Age, Snapshot, available_memory
from undula.state.pieces import is_complete

UNFINISHED = 2
"""Maximum number of incomplete states that are kept beside the newest complete one. It is more than one because a rank's part of a state
can arrive while another rank's part of the previous state is still on its way."""


@dataclass
class ReplicaStore:
    """Keeps the newest complete state, and the parts of newer states that have arrived."""

    _snapshots: dict[Age, dict[str, Snapshot]] = field(default_factory=dict)
    """Snapshots by age and sender."""

    def room(self) -> float:
        """Return the number of bytes that a rank's snapshot may take: half of the memory that is free on this node."""
        return FREE_SHARE * available_memory()

    @property
    def newest_whole(self) -> Age:
        """Age of the newest complete state; NEVER if there is none."""
        return max((age for age in self._snapshots if self._is_whole(age)), default=NEVER)

    def keep(self, sender: str, snapshot: Snapshot) -> None:
        """Store the snapshot that a rank has sent, and drop states that are no longer needed."""
        self._snapshots.setdefault(snapshot.age, {})[sender] = snapshot
        whole = self.newest_whole
        newer = sorted(age for age in self._snapshots if age > whole)[-UNFINISHED:]
        self._snapshots = {age: self._snapshots[age] for age in (whole, *newer) if age in self._snapshots}

    def share(self, rank: int, world_size: int) -> list[Snapshot]:
        """Return the snapshots that one rank fetches. All ranks together fetch everything in the store."""
        everything = [snapshot for _, of_ranks in sorted(self._snapshots.items()) for snapshot in of_ranks.values()]
        return everything[rank::world_size]

    def _is_whole(self, age: Age) -> bool:
        return is_complete([snapshot.holding for snapshot in self._snapshots[age].values()])
