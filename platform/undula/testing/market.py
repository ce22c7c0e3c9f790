"""What a run would cost under each policy of its fleet, on recorded counts of spot nodes: the nodes alone are simulated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from undula.elastic.pure.fleet import FleetManager, Pace, Work
from undula.elastic.pure.nodes import Node
from undula.plan.fleet import ON_DEMAND, SPOT, Fleet, FleetSpec
from undula.state.events import Event

STEPS = 10**6
"""That the work is cut into."""


@dataclass(frozen=True)
class Market:
    """How many spot nodes there are to have, over time; after the last count, again from the first."""

    counts: Sequence[int]
    gap_s: float
    """Seconds between counts."""
    first: int = 0
    """The count with which a run begins."""
    look_s: float = 60.0
    """Seconds between looks at the nodes."""

    def at(self, seconds: float) -> int:
        return self.counts[(self.first + int(seconds / self.gap_s)) % len(self.counts)]


@dataclass
class Bill:
    """What became of a run."""

    seconds: float = 0.0
    """To its end."""
    paid_s: dict[str, float] = field(default_factory=lambda: {SPOT: 0.0, ON_DEMAND: 0.0})
    """Seconds of all nodes of a market together, from the moment at which they were asked for."""
    taken: int = 0
    """Spot nodes that were taken."""

    def dollars(self, spot: float, on_demand: float) -> float:
        """Given the prices of a node, in dollars an hour."""
        return (self.paid_s[SPOT] * spot + self.paid_s[ON_DEMAND] * on_demand) / 3600


@dataclass
class _Nodes:
    """Of one market: when each is ready, in seconds."""

    market: str
    start_s: float
    ready_at: dict[str, float] = field(default_factory=dict)
    _count: int = 0

    def become(self, count: int, now: float) -> int:
        """Start what is missing, and let the youngest go; how many went."""
        gone = sorted(self.ready_at, key=lambda node: self.ready_at[node])[count:]
        for node in gone:
            del self.ready_at[node]
        for _ in range(count - len(self.ready_at)):
            self._count += 1
            self.ready_at[f"{self.market}-{self._count}"] = now + self.start_s
        return len(gone)

    def there(self, now: float) -> dict[str, Node]:
        """Those that have joined the cluster."""
        return {node: Node(node, 1, 0, None, self.market) for node, ready in self.ready_at.items() if ready <= now}

    def seconds_in(self, begin: float, end: float) -> float:
        """That they train, within a stretch of time, together."""
        return sum(max(end - max(begin, ready), 0.0) for ready in self.ready_at.values())


def run_under(
    market: Market,
    spec: FleetSpec,
    size: int,
    total_s: float,
    restart_s: float = 0.0,
    limit_s: float = float("inf"),
) -> Bill:
    """Simulate a run.

    Args:
        market: of spot nodes.
        spec: the policy, which says how long a node takes to start, too.
        size: workers of the whole fleet, each on a node of its own.
        total_s: seconds that the whole fleet needs for all the work.
        restart_s: that all nodes lose each time that a node comes or is taken; 0 for an elastic run.
        limit_s: when to give up.
    """
    bill, spot, on_demand = Bill(), _Nodes(SPOT, spec.node_start_s), _Nodes(ON_DEMAND, spec.node_start_s)
    fleet = FleetManager(spec, size, 1, Work(STEPS, 0.0), False, _nobody, _no_refusals)
    done_s, paused_until = 0.0, 0.0
    while done_s < total_s and bill.seconds < limit_s:
        now, end = bill.seconds, bill.seconds + market.look_s
        there, before = market.at(now), len(spot.there(now))
        bill.taken += spot.become(min(len(spot.ready_at), there), now)
        steps = int(done_s / total_s * STEPS)
        fleet.pace = Pace(steps * total_s / STEPS * size, steps, steps)
        wanted = _wanted(fleet, {**spot.there(now), **on_demand.there(now)}, now)
        for nodes in (spot, on_demand):
            nodes.ready_at = {node: ready for node, ready in nodes.ready_at.items() if node not in fleet.released}
        spot.become(min(max(wanted.spot, len(spot.there(now))), there), now)  # as the fleet gives back what it can
        on_demand.become(wanted.on_demand, now)
        if restart_s and len(spot.there(end)) != before:
            paused_until = now + restart_s
        since = max(now, paused_until)
        speed = min((spot.seconds_in(since, end) + on_demand.seconds_in(since, end)) / market.look_s, size) / size
        if done_s + speed * market.look_s >= total_s:
            end = now + (total_s - done_s) / speed
        done_s += speed * market.look_s
        for nodes in (spot, on_demand):
            bill.paid_s[nodes.market] += len(nodes.ready_at) * (end - now)
        bill.seconds = end
    return bill


def _wanted(fleet: FleetManager, nodes: Mapping[str, Node], now: float) -> Fleet:
    workers = dict.fromkeys(nodes, 1)
    fleet.update(nodes, workers, workers, now)
    return fleet.wanted


def _nobody(event: Event) -> None: ...


def _no_refusals(since: float) -> dict[str, str]:
    return {}
