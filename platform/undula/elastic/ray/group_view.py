"""What the scaling policy knows about the group that trains, and about a wait for workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from undula.elastic.pure.deadlock import DEADLOCK_S, CollectiveWait, deadlock
from undula.elastic.pure.policy import Decision
from undula.recovery.progress import ProgressView


@dataclass
class GroupView:
    """Controller's view of the group that trains."""

    last: dict[int, ProgressView] = field(default_factory=dict)
    """Newest progress of each rank."""
    leaving: Decision | None = None
    """Decision because of which the group was asked to end; None if it was not asked to end."""
    waits: tuple[CollectiveWait | None, ...] = ()
    """Collectives in which the ranks wait."""
    waits_since: float = 0.0
    """Time on the monotonic clock since which the ranks have waited in them."""
    broken_at: float | None = None
    """Time on the monotonic clock at which the collectives were aborted to break a deadlock of all ranks; None without a deadlock."""
    stays_since: float | None = None
    """Time on the monotonic clock since which the group has had fewer workers than it may have, for a reason that lasts."""

    def is_stepping(self, world_size: int) -> bool:
        """Return whether all ranks are in their training loop."""
        return len(self.last) == world_size and all(rank.step >= 0 for rank in self.last.values())

    def deadlock(self, waits: Sequence[CollectiveWait | None], now: float) -> str | None:
        """Return a sentence about ranks that have waited for each other in different collectives for DEADLOCK_S; None if they have not.

        Args:
            waits: Collective in which each rank waits now; None for a rank that does not wait in one.
            now: Time on the monotonic clock.
        """
        if tuple(waits) != self.waits:
            self.waits, self.waits_since = tuple(waits), now
        return deadlock(waits) if now - self.waits_since > DEADLOCK_S else None


@dataclass
class Wait:
    """State of a wait for workers; times are on the monotonic clock."""

    since: float | None = None
    """Start of the wait; None if the run does not wait."""
    lost_since: float | None = None
    """Time since which no ready worker has held the state; None if one holds it."""
    reported_at: float = float("-inf")
    """Time of the last event about the wait."""
    reported_ready: int = 0
    """Number of ready workers in this event."""
