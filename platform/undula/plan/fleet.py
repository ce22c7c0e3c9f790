"""How many spot and how many on-demand workers a run wants: pure.

Source of the deadline's policy: Uniform Progress, Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024,
section 5.2.2 (its four rules) and 5.5 (several instances). There a job of N nodes runs on all of them or on none; an elastic one goes on
with those that are there, so that here on-demand nodes come in the place of the spot nodes that are missing, and only those.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt
from pydantic import StringConstraints
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.plan.plan import STRICT

MARKET = "undula.io/market"
"""The label of Ray that says how a node was had: SPOT or ON_DEMAND."""
MACHINE = "undula.io/machine"
"""The label that has the cloud's name of the machine."""
TYPE = "undula.io/type"
"""The label that has the name of a node's type in the cluster's configuration."""
SPOT = "spot"
ON_DEMAND = "on-demand"
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@checked_dataclass(frozen=True, config=STRICT)
class FleetSpec:
    """Which nodes a job asks the cluster's autoscaler for, as told apart by Ray's label `undula.io/market`; at most one of the first three.

    By default any, so that the priorities of the cluster's configuration say what comes first.
    """

    spot_only: bool = False
    """Spot nodes alone; without them the job waits."""
    on_demand_floor: Annotated[int, Ge(1)] | None = None
    """So many workers on on-demand nodes always, and the others on spot nodes."""
    deadline: Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?[smhd]$")] | None = None
    """Time for the whole job since it was first submitted, such as 6h: spot nodes as long as the job, at the measured rate, keeps up with
    it, and on-demand ones in the place of those that are missing where it does not."""
    node_start_s: Annotated[float, Gt(0)] = 300.0
    """Seconds from asking for a node to the first step on it; a spot node that has not come by then is taken to be missing."""

    def __post_init__(self) -> None:
        given = [name for name in ("spot_only", "on_demand_floor", "deadline") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} are both given: keep one of them")
        if self.deadline_s == 0:
            raise ValueError(f"deadline is {self.deadline}, which is over at once: give some time")

    @property
    def is_any(self) -> bool:
        """Whether all nodes are alike to the job."""
        return not (self.spot_only or self.on_demand_floor or self.deadline)

    @property
    def deadline_s(self) -> float | None:
        """Seconds."""
        return float(self.deadline[:-1]) * _SECONDS[self.deadline[-1]] if self.deadline else None


@dataclass(frozen=True)
class RemainingWork:
    """Work and time of a run until its deadline; work is measured in the seconds that the whole fleet needs for it."""

    elapsed_s: float
    """Seconds since the run was first submitted."""
    deadline_s: float
    """Seconds from the first submission to the deadline."""
    total_s: float
    """Work of all steps of the plan in seconds, at the measured pace."""
    done_s: float
    """Work of the committed steps in seconds."""
    changeover_s: float
    """Seconds from the moment at which a node is needed to its first step: the time to the next decision plus the node's start."""

    @property
    def left_s(self) -> float:
        """Work of the remaining steps in seconds."""
        return max(self.total_s - self.done_s, 0.0)

    def expected_s(self, ahead_s: float = 0.0) -> float:
        """Work in seconds that an even pace would have done `ahead_s` seconds from now (equation 5)."""
        return min((self.elapsed_s + ahead_s) * self.total_s / self.deadline_s, self.total_s)

    @property
    def time_left_s(self) -> float:
        """Seconds until the deadline; negative once it has passed."""
        return self.deadline_s - self.elapsed_s

    @property
    def spare_s(self) -> float:
        """Seconds that may still be lost without missing the deadline; below two changeovers, no more may be lost (the safety net rule)."""
        return self.time_left_s - self.left_s


@dataclass(frozen=True)
class Fleet:
    """Workers on nodes of each market."""

    spot: int
    on_demand: int


def spot_only(size: int) -> Fleet:
    """All spot."""
    return Fleet(size, 0)


def on_demand_floor(size: int, floor: int) -> Fleet:
    """So many on-demand nodes always, and the rest spot."""
    on_demand = min(floor, size)
    return Fleet(size - on_demand, on_demand)


def by_deadline(size: int, there: Fleet, ready: Fleet, remaining: RemainingWork, hurries: bool) -> Fleet:
    """Uniform Progress: as much spot as there is, and on-demand in the place of what is missing, as long as it is needed to be in time.

    Args:
        size: workers of the whole fleet.
        there: room for workers on nodes that are there, those that still start included.
        ready: workers that train. An on-demand node stays until the spot node that comes in its place is one of them.
        remaining: of the run.
        hurries: whether what is left just fits: from then on each loss of a spot node would cost time that is not there, and on-demand
            nodes take the place of all of them, one after another as they are ready.

    Returns:
        What to ask for. More spot than there is is always asked for, so that spot that comes back is taken (taking risks).
    """
    if hurries:
        return Fleet(max(size - ready.on_demand, 0), size)
    missing = max(size - there.spot, 0)
    is_behind = remaining.done_s < remaining.expected_s()
    catches_up = there.on_demand > 0 and remaining.done_s < remaining.expected_s(ahead_s=2 * remaining.changeover_s)
    if is_behind or catches_up:
        return Fleet(size, max(missing, min(there.on_demand, size - ready.spot)))
    return Fleet(size, 0)
