"""Manager of a run's fleet, which decides which nodes the run requests from the cluster's autoscaler, uses and gives back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from undula.elastic.pure.nodes import Node
from undula.plan.fleet import (
    MARKET,
    ON_DEMAND,
    SPOT,
    TYPE,
    Fleet,
    FleetSpec,
    RemainingWork,
    by_deadline,
    on_demand_floor,
    spot_only,
)
from undula.state.events import Event, FleetEvent, IdleEvent, OverdueEvent, RefusalEvent, ReleaseEvent

DECISION_INTERVAL_S = 1.0
"""Seconds between two decisions."""
UNUSED_S = 60.0
"""Seconds for which a node may have unused room for workers before an event reports it."""
KEPT_STEPS = 500
"""Number of steps after which older measurements of the pace lose half of their weight."""
MEASURED_STEPS = 10
"""Minimum number of measured steps; with fewer, the pace is unknown."""
HURRIES_BELOW, HURRIES_UNTIL = 2.0, 4.0
"""Spare time below which a run begins to hurry, and spare time at which it stops hurrying, as multiples of the changeover time. A run that
hurries replaces all spot nodes by on-demand nodes."""
REFUSED_AGAIN_S = 600.0
"""Minimum seconds between two events about the same refused node type."""
AVOID_S = 60.0
"""Seconds after a refusal by the cloud during which the run does not request that node type."""


@dataclass(frozen=True)
class Work:
    """Size and start time of a job, from which the policy computes whether the job will meet its deadline."""

    total_steps: int
    """Number of steps of the whole job."""
    began: float
    """Time of the job's first submission in seconds since the epoch."""


@dataclass
class Pace:
    """Average number of worker-seconds per step. The older a measurement is, the less weight it has."""

    worker_s: float = 0.0
    """Measured time in seconds, summed over workers."""
    steps: float = 0.0
    """Number of steps that were measured."""
    done: int = 0
    """Number of steps that the run has committed."""
    _last: tuple[float | None, int] | None = None
    """Time and number of the newest observed step; None between groups. The time is None until the group's first step has ended, because
    that step may include compilation."""

    def observe(self, step: int, world_size: int, now: float) -> None:
        """Record that a group of `world_size` workers has committed `step` steps."""
        since, before = self._last or (None, step)
        self._last = self._last or (None, step)
        if step > before:
            if since is not None:
                keep = 0.5 if self.steps > KEPT_STEPS else 1.0
                self.worker_s = keep * self.worker_s + (now - since) * world_size
                self.steps = keep * self.steps + step - before
            self._last = (now, step)
        self.done = step

    def pause(self) -> None:
        """Record that the group has ended, so that the time until the next group does not count."""
        self._last = None

    def step_s(self, size: int) -> float | None:
        """Return the seconds that `size` workers need for a step, or None while the pace is unknown."""
        return self.worker_s / self.steps / size if self.steps >= MEASURED_STEPS else None


@dataclass
class FleetManager:
    """Manager of a run's fleet. It decides, by a FleetSpec, from which markets to request nodes, and gives back surplus nodes.

    Args:
        spec: Policy for the fleet.
        size: Number of workers of the whole fleet, which is the job's maximum.
        fewest: Minimum number of workers with which the job trains.
        work: Number of steps and start time of the job.
        has_gpus: Whether workers use GPUs. If they do, unused room on nodes is reported.
        on_event: Function that receives the fleet's events.
        refusals: Function that returns the node types that the cloud has refused since a given time, each with the reason; see Refusals.
    """

    spec: FleetSpec
    size: int
    fewest: int
    work: Work
    has_gpus: bool
    on_event: Callable[[Event], None]
    refusals: Callable[[float], Mapping[str, str]]
    pace: Pace = field(default_factory=Pace)
    wanted: Fleet = field(default_factory=lambda: Fleet(0, 0))
    released: frozenset[str] = frozenset()
    """Ids of the nodes that the run gives back, so that the autoscaler can terminate them."""
    labels: Sequence[Mapping[str, str]] = ()
    """Labels that the node of each wanted worker must have; one mapping per worker."""
    _decided_at: float = float("-inf")
    _short_since: float | None = None
    _hurries: bool = False
    _refused: Mapping[str, str] = field(default_factory=dict)
    _unused_since: dict[str, float] = field(default_factory=dict)
    _spot: int = 0
    """Number of workers that fitted on spot nodes at the last decision."""
    _reported: dict[str, float] = field(default_factory=dict)
    """Time of the last event about each subject: a refused node type, an unused node or a missed deadline."""

    def update(self, nodes: Mapping[str, Node], ready: Mapping[str, int], own: Mapping[str, int], now: float) -> None:
        """Decide which nodes to request and which to give back.

        Args:
            nodes: Nodes that are alive, by id.
            ready: Number of workers on each node that are ready to train.
            own: Number of workers of this run on each node, including workers that are starting.
            now: Current time in seconds since the epoch.
        """
        if now - self._decided_at < DECISION_INTERVAL_S:
            return
        self._decided_at = now
        staying = [node for node in nodes.values() if node.deadline is None]
        # Resources that other jobs use on a node are not available to this run.
        usable = [replace(node, slots=min(node.slots, node.free + own.get(node.id, 0))) for node in staying]
        if not self.spec.is_any:
            self._follow_policy(usable, ready, now)
        used = [node for node in usable if node.id not in self.released]
        if self.has_gpus:
            self._report_unused(used, now)
        self._learn_refusals(used, now)
        self.labels = self._labels(used)

    def room(self, market: str | None, workers: Mapping[str | None, int]) -> int:
        """Return the number of workers that may still start on nodes of a market, given the present number of workers in each market."""
        if self.spec.is_any or market is None:
            return self.size - sum(workers.values())
        return (self.wanted.spot if market == SPOT else self.wanted.on_demand) - workers.get(market, 0)

    def _follow_policy(self, usable: Sequence[Node], ready: Mapping[str, int], now: float) -> None:
        on = {market: [node for node in usable if node.market == market] for market in (SPOT, ON_DEMAND)}
        counts = {market: sum(ready.get(node.id, 0) for node in nodes) for market, nodes in on.items()}
        wanted, event = self._decide(on, Fleet(counts[SPOT], counts[ON_DEMAND]), now)
        if wanted != self.wanted:
            self.wanted = wanted
            self.on_event(event)
        limits = {SPOT: max(wanted.spot, self.size - counts[ON_DEMAND]), ON_DEMAND: wanted.on_demand}
        self._release({node for market, nodes in on.items() for node in _surplus(nodes, ready, limits[market])})

    def _decide(self, on: Mapping[str, list[Node]], ready: Fleet, now: float) -> tuple[Fleet, FleetEvent]:
        if self.spec.on_demand_floor:
            return _without_deadline(on_demand_floor(self.size, self.spec.on_demand_floor))
        if self.spec.deadline_s is None:
            return _without_deadline(spot_only(self.size))
        remaining = self._remaining(self.spec.deadline_s, now)
        if remaining.time_left_s < 0:
            self._report("deadline", OverdueEvent(-remaining.time_left_s), now)
            return _without_deadline(spot_only(self.size))
        spot = min(sum(node.slots for node in on[SPOT]), self.size)
        on_demand = sum(node.slots for node in on[ON_DEMAND] if node.id not in self.released)
        expected = self._expected_spot(spot, now)
        spare = remaining.spare_s / remaining.changeover_s
        self._hurries = self.pace.steps >= MEASURED_STEPS and (
            spare < (HURRIES_UNTIL if self._hurries else HURRIES_BELOW) and (self._hurries or spot < self.size)
        )
        wanted = by_deadline(self.size, Fleet(expected, on_demand), ready, remaining, self._hurries)
        if 0 < expected < self.fewest:  # otherwise the run would hold spot nodes without training on them
            wanted = Fleet(wanted.spot, max(wanted.on_demand, self.fewest - expected))
        work_left_s = None if self.pace.step_s(self.size) is None else remaining.left_s
        return wanted, FleetEvent(wanted.spot, wanted.on_demand, work_left_s, remaining.time_left_s)

    def _expected_spot(self, spot: int, now: float) -> int:
        """Return the number of workers to expect on spot nodes. As long as missing nodes may still start, this is the whole fleet."""
        if spot > self._spot:  # after one node has started, more may follow
            self._short_since = None
        self._spot = spot
        self._short_since = None if spot == self.size else self._short_since or now
        may_start = self._short_since is not None and now - self._short_since < self.spec.node_start_s
        return self.size if may_start else spot

    def _remaining(self, deadline_s: float, now: float) -> RemainingWork:
        # While the pace is unknown, so is the amount of work: the run counts as behind, because no work is done, but does not hurry.
        step_s = self.pace.step_s(self.size) or 1e-9
        return RemainingWork(
            elapsed_s=now - self.work.began,
            deadline_s=deadline_s,
            total_s=self.work.total_steps * step_s,
            done_s=self.pace.done * step_s,
            changeover_s=self.spec.node_start_s + DECISION_INTERVAL_S,
        )

    def _release(self, nodes: set[str]) -> None:
        for node in sorted(nodes - self.released):
            self.on_event(ReleaseEvent(node, self.wanted.spot, self.wanted.on_demand))
        self.released = frozenset(nodes)

    def _learn_refusals(self, used: Sequence[Node], now: float) -> None:
        """Update the refused node types. Without this, Ray's autoscaler would request the same type forever."""
        rooms = {market: sum(node.slots for node in used if market in (None, node.market)) for market in self._counts()}
        if all(rooms[market] >= count for market, count in self._counts().items()):
            self._refused = {}
            return
        self._refused = self.refusals(now - AVOID_S)
        for name, why in sorted(self._refused.items()):
            self._report(f"refused {name}", RefusalEvent(name, why[:200]), now, again_s=REFUSED_AGAIN_S)

    def _counts(self) -> dict[str | None, int]:
        """Return the number of wanted workers by market; the key None stands for any market."""
        if self.spec.is_any:
            return {None: self.size}
        return {SPOT: self.wanted.spot, ON_DEMAND: self.wanted.on_demand}

    def _report_unused(self, used: Sequence[Node], now: float) -> None:
        """Report nodes that have had room for more workers for at least UNUSED_S."""
        unused = {node.id: node.free for node in used if node.free}
        self._unused_since = {node: self._unused_since.get(node, now) for node in unused}
        for node, free in unused.items():
            if now - self._unused_since[node] >= UNUSED_S:
                self._report(f"unused {node}", IdleEvent(node, free, UNUSED_S, self.size), now)

    def _report(self, subject: str, event: Event, now: float, again_s: float = inf) -> None:
        """Send an event, unless an event about the same subject was sent less than `again_s` seconds ago."""
        if subject not in self._reported or now - self._reported[subject] >= again_s:
            self._reported[subject] = now
            self.on_event(event)

    def _labels(self, used: Sequence[Node]) -> list[dict[str, str]]:
        """Return the labels for each wanted worker. Existing nodes keep their type; other nodes must have a type that was not refused."""
        labels: list[dict[str, str]] = []
        for market, count in self._counts().items():
            base = {MARKET: market} if market else {}
            if not self._refused:
                labels += [base] * count
                continue
            staying = [node for node in used if market in (None, node.market)]
            own = [{**base, TYPE: node.type} if node.type else base for node in staying for _ in range(node.slots)]
            other = {**base, TYPE: f"!in({','.join(sorted(self._refused))})"}
            labels += [*own[:count], *[other] * (count - len(own))]
        return labels


def _surplus(nodes: list[Node], workers: Mapping[str, int], limit: int) -> list[str]:
    """Return the ids of the nodes that are not needed for `limit` workers. Nodes with more running workers are kept first."""
    surplus, room = [], limit
    for node in sorted(nodes, key=lambda node: (-workers.get(node.id, 0), node.id)):
        if room <= 0:
            surplus.append(node.id)
        room -= node.slots
    return surplus


def _without_deadline(wanted: Fleet) -> tuple[Fleet, FleetEvent]:
    return wanted, FleetEvent(wanted.spot, wanted.on_demand)
