"""Number of spot and on-demand workers that a run requests. Pure.

The policy for a deadline is Uniform Progress: Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024,
sections 5.2.2 (its four rules) and 5.5 (several instances). In the paper, a job of N nodes runs on all of them or not at all. An elastic
job also trains on fewer nodes, so on-demand nodes here only replace the spot nodes that are missing.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt
from pydantic import StringConstraints
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT

MARKET = "undula.io/market"
"""Ray node label for the market a node was bought on: SPOT or ON_DEMAND."""
MACHINE = "undula.io/machine"
"""Ray node label for the cloud's name of the machine type, such as g6.xlarge."""
TYPE = "undula.io/type"
"""Ray node label for the node type's name in the cluster configuration."""
GPU_GIB = "undula.io/gpu-gib"
"""Ray node label for the memory of each of its GPUs in GiB, such as 22.0, for nodes that cannot tell it."""
SPOT = "spot"
ON_DEMAND = "on-demand"
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@checked_dataclass(frozen=True, config=STRICT)
class FleetSpec:
    """Nodes that a job requests from the cluster's autoscaler, selected by the Ray node label `undula.io/market`.

    At most one of `spot_only`, `on_demand_floor` and `deadline` can be set. By default the job accepts any node, and the priorities in the
    cluster configuration decide which type comes first.
    """

    spot_only: bool = False
    """Whether to train on spot nodes only. The job waits while no spot node is available."""
    on_demand_floor: Annotated[int, Ge(1)] | None = None
    """Minimum number of workers on on-demand nodes; the other workers run on spot nodes."""
    deadline: Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?[smhd]$")] | None = None
    """Time limit for the whole job, counted from its first submission, such as 6h. The job trains on spot nodes while the measured rate is
    high enough to meet the limit; when it falls behind, on-demand nodes replace the missing spot nodes."""
    node_start_s: Annotated[float, Gt(0)] = 300.0
    """Expected time in seconds from requesting a node to the first step on it. A spot node that takes longer counts as missing."""

    def __post_init__(self) -> None:
        given = [name for name in ("spot_only", "on_demand_floor", "deadline") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} cannot be combined; remove one of them")
        if self.deadline_s == 0:
            raise ValueError(
                f"deadline is {self.deadline}, which leaves no time to train; set a longer time, such as 6h"
            )

    @property
    def is_any(self) -> bool:
        """Whether the job accepts spot and on-demand nodes alike."""
        return not (self.spot_only or self.on_demand_floor or self.deadline)

    @property
    def deadline_s(self) -> float | None:
        """`deadline` in seconds; None without a deadline."""
        return float(self.deadline[:-1]) * _SECONDS[self.deadline[-1]] if self.deadline else None


@dataclass(frozen=True)
class RemainingWork:
    """Work and time of a run until its deadline. Work is measured in the seconds that the whole fleet needs for it."""

    elapsed_s: float
    """Seconds since the run was submitted."""
    deadline_s: float
    """Seconds from the submission to the deadline."""
    total_s: float
    """Work of the whole run, in seconds of the whole fleet at the measured rate."""
    done_s: float
    """Work that is committed, in seconds of the whole fleet."""
    changeover_s: float
    """Seconds from the moment a node is needed to its first step: the wait for the next decision plus the start of the node."""

    @property
    def left_s(self) -> float:
        """Work that is left, in seconds of the whole fleet."""
        return max(self.total_s - self.done_s, 0.0)

    def expected_s(self, ahead_s: float = 0.0) -> float:
        """Work, in seconds, that a run at an even pace has done `ahead_s` seconds from now (equation 5 of the paper)."""
        return min((self.elapsed_s + ahead_s) * self.total_s / self.deadline_s, self.total_s)

    @property
    def time_left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline_s - self.elapsed_s

    @property
    def spare_s(self) -> float:
        """Seconds that the run can lose and still meet its deadline. Below two changeovers, it must not lose any (the safety net rule)."""
        return self.time_left_s - self.left_s


@dataclass(frozen=True)
class Fleet:
    """Number of workers on the nodes of each market."""

    spot: int
    on_demand: int


def spot_only(size: int) -> Fleet:
    """Return a fleet of spot workers only."""
    return Fleet(size, 0)


def on_demand_floor(size: int, floor: int) -> Fleet:
    """Return a fleet with `floor` on-demand workers and spot workers for the rest."""
    on_demand = min(floor, size)
    return Fleet(size - on_demand, on_demand)


def by_deadline(size: int, available: Fleet, ready: Fleet, remaining: RemainingWork, is_urgent: bool) -> Fleet:
    """Return the fleet of Uniform Progress: spot workers, and on-demand workers in place of missing ones while the run is behind.

    Args:
        size: Number of workers of the whole fleet.
        available: Number of workers that fit on the present nodes, including nodes that are still starting.
        ready: Number of workers that train. An on-demand node stays until the spot node that replaces it is ready.
        remaining: Work and time of the run until its deadline.
        is_urgent: Whether the remaining work only just fits into the remaining time. The run can then no longer afford to lose a spot
            node, so on-demand nodes replace all spot nodes, one by one as they become ready.

    Returns:
        The fleet to request. Outside of the urgent phase it always includes a full fleet of spot workers, so that the run takes spot
        nodes as soon as they come back (the paper's taking risks rule).
    """
    if is_urgent:
        return Fleet(max(size - ready.on_demand, 0), size)
    missing = max(size - available.spot, 0)
    is_behind = remaining.done_s < remaining.expected_s()
    catches_up = available.on_demand > 0 and remaining.done_s < remaining.expected_s(ahead_s=2 * remaining.changeover_s)
    if is_behind or catches_up:
        return Fleet(size, max(missing, min(available.on_demand, size - ready.spot)))
    return Fleet(size, 0)
