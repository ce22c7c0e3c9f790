"""How many spot and how many on-demand nodes a run wants: pure.

Source of the deadline's policy: Uniform Progress, Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024,
section 5.2.2 (its four rules) and 5.5 (several instances). There a job of N nodes runs on all of them or on none; an elastic one goes on
with those that are there, so that here on-demand nodes come in the place of the spot nodes that are missing, and only those.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a run is, in seconds of the whole fleet: what all of its nodes together do in one."""

    elapsed_s: float
    """Since the run was submitted."""
    deadline_s: float
    """After which it is late, from the same moment on."""
    total_s: float
    """Of work, at the measured rate."""
    done_s: float
    """Of it, what is committed."""
    changeover_s: float
    """From the moment at which a node is needed to its first step: the time until the next look, and until it has started."""

    @property
    def left_s(self) -> float:
        return max(self.total_s - self.done_s, 0.0)

    def expected_s(self, ahead_s: float = 0.0) -> float:
        """Work that is done by then where all of it is spread evenly over the time (equation 5)."""
        return min((self.elapsed_s + ahead_s) * self.total_s / self.deadline_s, self.total_s)

    @property
    def must_hurry(self) -> bool:
        """Whether what is left fits into what time there is only if no more of it is lost (the safety net rule)."""
        return self.deadline_s - self.elapsed_s < self.left_s + 2 * self.changeover_s


@dataclass(frozen=True)
class Fleet:
    """Nodes of each kind."""

    spot: int
    on_demand: int

    @property
    def nodes(self) -> int:
        return self.spot + self.on_demand


def spot_only(size: int) -> Fleet:
    """All spot."""
    return Fleet(size, 0)


def on_demand_floor(size: int, floor: int) -> Fleet:
    """So many on-demand nodes always, and the rest spot."""
    on_demand = min(floor, size)
    return Fleet(size - on_demand, on_demand)


def by_deadline(size: int, there: Fleet, ready_spot: int, progress: Progress) -> Fleet:
    """Uniform Progress: as much spot as there is, and on-demand in the place of what is missing, as long as it is needed to be in time.

    Args:
        size: nodes of the whole fleet.
        there: nodes that are there, those that still start included.
        ready_spot: spot nodes that train. An on-demand node stays until the spot node that comes in its place is one of them.
        progress: of the run.

    Returns:
        Nodes to ask for. More spot than there is is always asked for, so that spot that comes back is taken (taking risks).
    """
    missing = max(size - there.spot, 0)
    if progress.must_hurry and missing:
        return Fleet(0, size)  # to the end: each loss of a spot node would cost time that is not there
    is_behind = progress.done_s < progress.expected_s()
    catches_up = there.on_demand > 0 and progress.done_s < progress.expected_s(ahead_s=2 * progress.changeover_s)
    if is_behind or catches_up:
        return Fleet(size, max(missing, min(there.on_demand, size - ready_spot)))
    return Fleet(size, 0)
