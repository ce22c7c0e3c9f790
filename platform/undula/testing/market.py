"""Simulation of a run's cost under a fleet policy, on recorded numbers of spot nodes. Only the nodes are simulated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from undula.elastic.pure.fleet import FleetManager, Pace, Work
from undula.elastic.pure.nodes import Node
from undula.plan.fleet import ON_DEMAND, SPOT, Fleet, FleetSpec
from undula.state.events import Event

STEPS = 10**6
"""Number of steps of the simulated work."""


@dataclass(frozen=True)
class Market:
    """Number of available spot nodes over time. The counts repeat after the last one."""

    counts: Sequence[int]
    gap_s: float
    """Seconds between two counts."""
    first: int = 0
    """Index of the count at the start of the run."""
    decision_s: float = 60.0
    """Seconds between two decisions of the fleet policy."""

    def at(self, seconds: float) -> int:
        """Return the number of available nodes after a number of seconds."""
        return self.counts[(self.first + int(seconds / self.gap_s)) % len(self.counts)]


@dataclass
class Bill:
    """Result of a simulated run."""

    seconds: float = 0.0
    """Duration of the run in seconds."""
    paid_s: dict[str, float] = field(default_factory=lambda: {SPOT: 0.0, ON_DEMAND: 0.0})
    """Node-seconds by market, counted from the request of each node."""
    taken: int = 0
    """Number of preempted spot nodes."""

    def dollars(self, spot: float, on_demand: float) -> float:
        """Return the cost in US dollars, given the prices of a node in US dollars per hour."""
        return (self.paid_s[SPOT] * spot + self.paid_s[ON_DEMAND] * on_demand) / 3600


@dataclass
class _Nodes:
    """Nodes of one market."""

    market: str
    start_s: float
    """Time in seconds from the request of a node until it is ready."""
    ready_at: dict[str, float] = field(default_factory=dict)
    """Time in seconds at which each node is ready."""
    _count: int = 0

    def resize(self, count: int, now: float) -> int:
        """Request missing nodes or end the youngest ones, and return how many were ended."""
        gone = sorted(self.ready_at, key=lambda node: self.ready_at[node])[count:]
        for node in gone:
            del self.ready_at[node]
        for _ in range(count - len(self.ready_at)):
            self._count += 1
            self.ready_at[f"{self.market}-{self._count}"] = now + self.start_s
        return len(gone)

    def ready(self, now: float) -> dict[str, Node]:
        """Return the nodes that have joined the cluster."""
        return {node: Node(node, 1, 0, None, self.market) for node, ready in self.ready_at.items() if ready <= now}

    def seconds_in(self, begin: float, end: float) -> float:
        """Return the node-seconds of training between two times."""
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
        market: Available spot nodes.
        spec: Fleet policy, including the time that a node takes to start.
        size: Number of workers of the whole fleet, each on its own node.
        total_s: Time in seconds that the whole fleet needs for all the work.
        restart_s: Time in seconds that all nodes lose at each change of the fleet; 0 for an elastic run.
        limit_s: Simulated time in seconds after which the simulation stops, even if the run is not done.
    """
    bill, spot, on_demand = Bill(), _Nodes(SPOT, spec.node_start_s), _Nodes(ON_DEMAND, spec.node_start_s)
    fleet = FleetManager(spec, size, 1, Work(STEPS, 0.0), False, _nobody, _no_refusals)
    done_s, paused_until = 0.0, 0.0
    while done_s < total_s and bill.seconds < limit_s:
        now, end = bill.seconds, bill.seconds + market.decision_s
        available, before = market.at(now), len(spot.ready(now))
        bill.taken += spot.resize(min(len(spot.ready_at), available), now)
        steps = int(done_s / total_s * STEPS)
        fleet.pace = Pace(steps * total_s / STEPS * size, steps, steps)
        wanted = _wanted(fleet, {**spot.ready(now), **on_demand.ready(now)}, now)
        for nodes in (spot, on_demand):
            nodes.ready_at = {node: ready for node, ready in nodes.ready_at.items() if node not in fleet.released}
        # The fleet manager releases the spot nodes that it does not need, so the simulation does not end any others.
        spot.resize(min(max(wanted.spot, len(spot.ready(now))), available), now)
        on_demand.resize(wanted.on_demand, now)
        if restart_s and len(spot.ready(end)) != before:
            paused_until = now + restart_s
        since = max(now, paused_until)
        speed = min((spot.seconds_in(since, end) + on_demand.seconds_in(since, end)) / market.decision_s, size) / size
        if done_s + speed * market.decision_s >= total_s:
            end = now + (total_s - done_s) / speed
        done_s += speed * market.decision_s
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
