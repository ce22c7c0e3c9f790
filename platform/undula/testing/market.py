"""What a run would cost under each policy of its fleet, on a recorded count of spot instances: a simulation of nodes, not of training."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from undula.plan.fleet import Fleet, Progress, by_deadline, spot_only


class Policy(StrEnum):
    """Of a fleet."""

    ON_DEMAND = "on-demand only"
    SPOT_ONLY = "spot only"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Market:
    """How many spot nodes there are to have, over time; after the last count, again from the first."""

    counts: Sequence[int]
    gap_s: float
    """Seconds between counts."""
    first: int = 0
    """The count with which a run begins."""
    look_s: float = 60.0
    """Seconds between a policy's looks."""

    def at(self, seconds: float) -> int:
        return self.counts[(self.first + int(seconds / self.gap_s)) % len(self.counts)]


@dataclass
class Bill:
    """What became of a run."""

    seconds: float = 0.0
    """To its end."""
    spot_s: float = 0.0
    """Seconds that were paid, of all spot nodes together; and of all on-demand nodes."""
    on_demand_s: float = 0.0
    lost: int = 0
    """Spot nodes that were taken."""

    def dollars(self, spot: float, on_demand: float) -> float:
        """Given the prices of a node, in dollars an hour."""
        return (self.spot_s * spot + self.on_demand_s * on_demand) / 3600


@dataclass
class _Nodes:
    """Of one kind: when each is ready, in seconds."""

    ready_at: list[float] = field(default_factory=list)

    def become(self, count: int, now: float, changeover_s: float) -> int:
        """Start what is missing, and let the youngest go; how many went."""
        gone = max(len(self.ready_at) - count, 0)
        self.ready_at = sorted(self.ready_at)[:count]
        self.ready_at += [now + changeover_s] * (count - len(self.ready_at))
        return gone

    def seconds_in(self, begin: float, end: float) -> float:
        """That they train, within a stretch of time, together."""
        return sum(max(end - max(begin, ready), 0.0) for ready in self.ready_at)


def run_under(
    market: Market,
    policy: Policy,
    size: int,
    total_s: float,
    deadline_s: float,
    changeover_s: float,
    restart_s: float = 0.0,
    limit_s: float = float("inf"),
) -> Bill:
    """Simulate a run.

    Args:
        market: of spot nodes.
        policy: of the fleet.
        size: nodes of the whole fleet.
        total_s: seconds that the whole fleet needs for all the work.
        deadline_s: after which the run is late.
        changeover_s: from asking for a node to its first step.
        restart_s: that all nodes lose each time that a node comes or is taken; 0 for an elastic run.
        limit_s: when to give up.
    """
    bill, spot, on_demand = Bill(), _Nodes(), _Nodes()
    done_s, paused_until = 0.0, 0.0
    while done_s < total_s and bill.seconds < limit_s:
        now, end = bill.seconds, bill.seconds + market.look_s
        there = market.at(now)
        before = len(spot.ready_at)
        taken = spot.become(min(before, there), now, changeover_s)
        progress = Progress(now, deadline_s, total_s, done_s, changeover_s + market.look_s)
        wanted = _wanted(policy, size, spot, on_demand, now, progress)
        spot.become(min(wanted.spot, there), now, changeover_s)
        on_demand.become(wanted.on_demand, now, changeover_s)
        if restart_s and len(spot.ready_at) != before:
            paused_until = now + restart_s
        trained = spot.seconds_in(max(now, paused_until), end) + on_demand.seconds_in(max(now, paused_until), end)
        speed = min(trained / market.look_s, size) / size
        if done_s + speed * market.look_s >= total_s:
            end = now + (total_s - done_s) / speed
        done_s += speed * market.look_s
        bill.spot_s += len(spot.ready_at) * (end - now)
        bill.on_demand_s += len(on_demand.ready_at) * (end - now)
        bill.lost += taken
        bill.seconds = end
    return bill


def _wanted(policy: Policy, size: int, spot: _Nodes, on_demand: _Nodes, now: float, progress: Progress) -> Fleet:
    if policy == Policy.ON_DEMAND:
        return Fleet(0, size)
    if policy == Policy.SPOT_ONLY:
        return spot_only(size)
    ready = sum(each <= now for each in spot.ready_at)
    return by_deadline(size, Fleet(len(spot.ready_at), len(on_demand.ready_at)), ready, progress)
