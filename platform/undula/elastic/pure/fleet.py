"""Which nodes a run asks the cluster's autoscaler for, which it trains on, and which it gives back."""

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
"""Between a policy's looks."""
UNUSED_S = 60.0
"""For which there may be room that nobody uses before it is told."""
KEPT_STEPS = 500
MEASURED_STEPS = 10
"""Before which a pace is not known."""
HURRIES_BELOW, HURRIES_UNTIL = 2.0, 4.0
"""Changeovers of time to spare, below which a run hurries, and until which it goes on with it."""
REFUSED_AGAIN_S = 600.0
"""Between two words on the same type that could not be had."""
AVOID_S = 60.0
"""For which a type of nodes that could not be had is not asked for again."""


@dataclass(frozen=True)
class Work:
    """What a deadline is reckoned from."""

    total_steps: int
    began: float
    """When the job was first submitted, in seconds since the epoch."""


@dataclass
class Pace:
    """How long a worker needs for a step, from what the groups have done; what is long ago counts less and less."""

    worker_s: float = 0.0
    """Seconds of all workers."""
    steps: float = 0.0
    """In them."""
    done: int = 0
    """Steps that the run has come to."""
    _last: tuple[float | None, int] | None = None
    """When the group's newest step was seen, None before its first, which may compile; and the step."""

    def observe(self, step: int, world_size: int, now: float) -> None:
        """A group of so many workers has committed `step` steps."""
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
        """The group has ended: what follows is no training."""
        self._last = None

    def step_s(self, size: int) -> float | None:
        """Seconds that so many workers need for a step; None before some were measured."""
        return self.worker_s / self.steps / size if self.steps >= MEASURED_STEPS else None


@dataclass
class FleetManager:
    """Carries out a FleetSpec: decides which market's nodes to ask for, and gives back those that are too many.

    Args:
        spec: the policy.
        size: workers of the whole fleet, the job's most.
        fewest: workers without which the job waits.
        work: what there is to do.
        has_gpus: whether room that nobody uses is worth a word.
        refusals: tells which types of nodes were not to be had since a time, and why, as Refusals does.
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
    """Nodes that the run leaves, for the autoscaler to end."""
    labels: Sequence[Mapping[str, str]] = ()
    """That each worker's node is to have, for the autoscaler; one mapping for each worker that is wanted."""
    _decided_at: float = float("-inf")
    _short_since: float | None = None
    _hurries: bool = False
    _refused: Mapping[str, str] = field(default_factory=dict)
    _unused_since: dict[str, float] = field(default_factory=dict)
    _spot: int = 0
    """Room on spot nodes, as last seen."""
    _reported: dict[str, float] = field(default_factory=dict)
    """Time of the last event on each subject: a refused type, an unused node, or a passed deadline."""

    def update(self, nodes: Mapping[str, Node], ready: Mapping[str, int], own: Mapping[str, int], now: float) -> None:
        """Decide anew.

        Args:
            nodes: that are alive.
            ready: workers that can train, by node.
            own: all workers of the run, by node.
            now: in seconds since the epoch.
        """
        if now - self._decided_at < DECISION_INTERVAL_S:
            return
        self._decided_at = now
        staying = [node for node in nodes.values() if node.deadline is None]
        # What others use of a node is no room for this run.
        there = [replace(node, slots=min(node.slots, node.free + own.get(node.id, 0))) for node in staying]
        if not self.spec.is_any:
            self._follow(there, ready, now)
        used = [node for node in there if node.id not in self.released]
        if self.has_gpus:
            self._report_unused(used, now)
        self._learn_refusals(used, now)
        self.labels = self._labels(used)

    def room(self, market: str | None, workers: Mapping[str | None, int]) -> int:
        """Workers that may still be started on nodes of a market, given how many there are by market."""
        if self.spec.is_any or market is None:
            return self.size - sum(workers.values())
        return (self.wanted.spot if market == SPOT else self.wanted.on_demand) - workers.get(market, 0)

    def _follow(self, there: Sequence[Node], ready: Mapping[str, int], now: float) -> None:
        """The policy."""
        on = {market: [node for node in there if node.market == market] for market in (SPOT, ON_DEMAND)}
        counts = {market: sum(ready.get(node.id, 0) for node in found) for market, found in on.items()}
        wanted, event = self._decide(on, Fleet(counts[SPOT], counts[ON_DEMAND]), now)
        if wanted != self.wanted:
            self.wanted = wanted
            self.on_event(event)
        limits = {SPOT: max(wanted.spot, self.size - counts[ON_DEMAND]), ON_DEMAND: wanted.on_demand}
        self._release({node for market, found in on.items() for node in _beyond(found, ready, limits[market])})

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
        if spot > self._spot:  # where one has come, others may follow
            self._short_since = None
        self._spot = spot
        self._short_since = None if spot == self.size else self._short_since or now
        expected = spot
        if self._short_since is not None and now - self._short_since < self.spec.node_start_s:
            expected = self.size  # what is missing may be on its way
        spare = remaining.spare_s / remaining.changeover_s
        self._hurries = self.pace.steps >= MEASURED_STEPS and (
            spare < (HURRIES_UNTIL if self._hurries else HURRIES_BELOW) and (self._hurries or spot < self.size)
        )
        wanted = by_deadline(self.size, Fleet(expected, on_demand), ready, remaining, self._hurries)
        if 0 < expected < self.fewest:  # or they are held, and nothing trains on them
            wanted = Fleet(wanted.spot, max(wanted.on_demand, self.fewest - expected))
        is_known = self.pace.step_s(self.size) is not None
        work_left_s = remaining.left_s if is_known else None
        return wanted, FleetEvent(wanted.spot, wanted.on_demand, work_left_s, remaining.time_left_s)

    def _remaining(self, deadline_s: float, now: float) -> RemainingWork:
        # Before steps were measured the work is unknown: the run is behind, as nothing is done, and need not hurry.
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
        """Which types of nodes are not to be had: Ray's autoscaler would ask for the same one for ever."""
        rooms = {market: sum(node.slots for node in used if market in (None, node.market)) for market in self._counts()}
        if all(rooms[market] >= count for market, count in self._counts().items()):
            self._refused = {}
            return
        self._refused = self.refusals(now - AVOID_S)
        for name, why in sorted(self._refused.items()):
            self._report(f"refused {name}", RefusalEvent(name, why[:200]), now, again_s=REFUSED_AGAIN_S)

    def _counts(self) -> dict[str | None, int]:
        """Workers that are wanted by market; None for any."""
        if self.spec.is_any:
            return {None: self.size}
        return {SPOT: self.wanted.spot, ON_DEMAND: self.wanted.on_demand}

    def _report_unused(self, used: Sequence[Node], now: float) -> None:
        """Room that is held, and that nobody uses."""
        unused = {node.id: node.free for node in used if node.free}
        self._unused_since = {node: self._unused_since.get(node, now) for node in unused}
        for node, free in unused.items():
            if now - self._unused_since[node] >= UNUSED_S:
                self._report(f"unused {node}", IdleEvent(node, free, UNUSED_S, self.size), now)

    def _report(self, subject: str, event: Event, now: float, again_s: float = inf) -> None:
        """Send an event unless one on the same subject was sent less than `again_s` seconds ago."""
        if subject not in self._reported or now - self._reported[subject] >= again_s:
            self._reported[subject] = now
            self.on_event(event)

    def _labels(self, used: Sequence[Node]) -> list[dict[str, str]]:
        """Nodes that are there are asked for by their own type, as what is left goes to types that are not refused."""
        found: list[dict[str, str]] = []
        for market, count in self._counts().items():
            base = {MARKET: market} if market else {}
            if not self._refused:
                found += [base] * count
                continue
            staying = [node for node in used if market in (None, node.market)]
            own = [{**base, TYPE: node.type} if node.type else base for node in staying for _ in range(node.slots)]
            other = {**base, TYPE: f"!in({','.join(sorted(self._refused))})"}
            found += [*own[:count], *[other] * (count - len(own))]
        return found


def _beyond(nodes: list[Node], workers: Mapping[str, int], limit: int) -> list[str]:
    """The nodes that are not needed for so many workers; those with workers are needed first."""
    found, room = [], limit
    for node in sorted(nodes, key=lambda node: (-workers.get(node.id, 0), node.id)):
        if room <= 0:
            found.append(node.id)
        room -= node.slots
    return found


def _without_deadline(wanted: Fleet) -> tuple[Fleet, FleetEvent]:
    return wanted, FleetEvent(wanted.spot, wanted.on_demand)
