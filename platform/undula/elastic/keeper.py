"""What the controller keeps of the ranks' state, on the node that outlives all others."""

from dataclasses import dataclass, field

from undula.state.parts import is_complete
from undula.state.snapshot import FREE_SHARE, NEVER, Age, Snapshot, available_memory


@dataclass
class SnapshotKeeper:
    """Keeps the newest state that is whole, and what has come of newer ones."""

    _snapshots: dict[Age, dict[str, Snapshot]] = field(default_factory=dict)
    """By age and sender."""

    def has_room(self, num_bytes: int) -> bool:
        """Whether a rank's snapshot takes at most half of the memory that is free here."""
        return num_bytes <= FREE_SHARE * available_memory()

    def keep(self, sender: str, snapshot: Snapshot) -> None:
        """Keep what a rank has sent."""
        self._snapshots.setdefault(snapshot.age, {})[sender] = snapshot
        newest = max((age for age in self._snapshots if self._is_whole(age)), default=NEVER)
        self._snapshots = {age: of_ranks for age, of_ranks in self._snapshots.items() if age >= newest}

    def share(self, rank: int, world_size: int) -> list[Snapshot]:
        """What one of so many ranks is to fetch, so that they have all of it together."""
        everything = [snapshot for _, of_ranks in sorted(self._snapshots.items()) for snapshot in of_ranks.values()]
        return everything[rank::world_size]

    def _is_whole(self, age: Age) -> bool:
        return is_complete([snapshot.sharding for snapshot in self._snapshots[age].values()])
