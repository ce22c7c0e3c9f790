"""What the controller keeps of the ranks' state, on the node that outlives all others."""

from dataclasses import dataclass, field

from undula.recovery.snapshot import FREE_SHARE, NEVER, Age, Snapshot, available_memory
from undula.state.pieces import is_complete

UNFINISHED = 2
"""Ages newer than the newest whole one of which parts are kept: one rank's may come while another's of the age before is on its way."""


@dataclass
class ReplicaStore:
    """Keeps the newest state that is whole, and what has come of newer ones."""

    _snapshots: dict[Age, dict[str, Snapshot]] = field(default_factory=dict)
    """By age and sender."""

    def room(self) -> float:
        """Bytes that a rank's snapshot may take: half of the memory that is free here."""
        return FREE_SHARE * available_memory()

    @property
    def newest_whole(self) -> Age:
        """Its age; NEVER where there is none."""
        return max((age for age in self._snapshots if self._is_whole(age)), default=NEVER)

    def keep(self, sender: str, snapshot: Snapshot) -> None:
        """Keep what a rank has sent."""
        self._snapshots.setdefault(snapshot.age, {})[sender] = snapshot
        whole = self.newest_whole
        newer = sorted(age for age in self._snapshots if age > whole)[-UNFINISHED:]
        self._snapshots = {age: self._snapshots[age] for age in (whole, *newer) if age in self._snapshots}

    def share(self, rank: int, world_size: int) -> list[Snapshot]:
        """What one of so many ranks is to fetch, so that they have all of it together."""
        everything = [snapshot for _, of_ranks in sorted(self._snapshots.items()) for snapshot in of_ranks.values()]
        return everything[rank::world_size]

    def _is_whole(self, age: Age) -> bool:
        return is_complete([snapshot.holding for snapshot in self._snapshots[age].values()])
