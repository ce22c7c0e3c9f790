"""Which nodes a run asks the cluster's autoscaler for, which it trains on, and which it gives back."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator

from undula.elastic.capacity import Node, refused_types
from undula.plan.fleet import (
    MARKET,
    ON_DEMAND,
    SPOT,
    TYPE,
    Fleet,
    FleetSpec,
    Progress,
    by_deadline,
    on_demand_floor,
    spot_only,
)
from undula.state.ledger import Event

REPEAT_S = 20.0
"""Between requests that say the same, which Ray forgets after a while."""
EXPIRES_S = 180.0
LOOK_S = 1.0
"""Between a policy's looks."""
IDLE_S = 60.0
"""For which nothing may run on a node before it is told."""
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
    """How long a worker needs for a step, from what the groups have done."""

    worker_s: float = 0.0
    """Seconds of all workers."""
    steps: int = 0
    """In them."""
    done: int = 0
    """Steps that the run has come to."""
    _last: tuple[float, int] | None = None

    def saw(self, step: int, world_size: int, now: float) -> None:
        """A group of so many workers has committed `step` steps."""
        if self._last is None:
            self._last = (now, step)
        since, before = self._last
        if step > before:
            self.worker_s += (now - since) * world_size
            self.steps += step - before
            self._last = (now, step)
        self.done = step

    def pause(self) -> None:
        """The group has ended: what follows is no training."""
        self._last = None

    def step_s(self, size: int) -> float | None:
        """Seconds that so many workers need for a step; None before any was measured."""
        return self.worker_s / self.steps / size if self.steps else None


@dataclass
class FleetManager:
    """Carries out a FleetSpec: decides which market's nodes to ask for, and gives back those that are too many.

    Args:
        spec: the policy.
        size: workers of the whole fleet, the job's most.
        work: what there is to do.
        refusals: tells which types of nodes were not to be had since a time, as `refused_types` does.
    """

    spec: FleetSpec
    size: int
    work: Work
    on_event: Callable[[Event], None]
    refusals: Callable[[float], Mapping[str, str]] = refused_types
    pace: Pace = field(default_factory=Pace)
    wanted: Fleet = field(default_factory=lambda: Fleet(0, 0))
    given_back: frozenset[str] = frozenset()
    """Nodes that the run leaves, for the autoscaler to end."""
    labels: Sequence[Mapping[str, str]] = ()
    """That each worker's node is to have, for the autoscaler; one mapping for each worker that is wanted."""
    _looked: float = float("-inf")
    _short_since: float | None = None
    _refused: Mapping[str, str] = field(default_factory=dict)
    _idle_since: dict[str, float] = field(default_factory=dict)
    _told_idle: set[str] = field(default_factory=set)

    def look(self, nodes: Mapping[str, Node], workers: Mapping[str, int], now: float) -> None:
        """Decide anew.

        Args:
            nodes: that are alive.
            workers: that are ready, by node.
            now: in seconds since the epoch.
        """
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        there = [node for node in nodes.values() if node.deadline is None]
        if not self.spec.is_any:
            self._follow(there, workers, now)
        self._tell_idle(there, now)
        self._learn_refusals(there, now)
        self.labels = self._labels(there)

    def _follow(self, there: Sequence[Node], workers: Mapping[str, int], now: float) -> None:
        """The policy."""
        on = {market: [node for node in there if node.market == market] for market in (SPOT, ON_DEMAND)}
        ready = {market: sum(workers.get(node.id, 0) for node in found) for market, found in on.items()}
        wanted, why = self._decide(on, ready, now)
        if wanted != self.wanted:
            self.wanted = wanted
            self.on_event(Event("fleet", f"asking for {_words(wanted)}{why}", data=vars(wanted)))
        limits = {SPOT: max(wanted.spot, self.size - ready[ON_DEMAND]), ON_DEMAND: wanted.on_demand}
        self._give_back({node for market, found in on.items() for node in _beyond(found, workers, limits[market])})

    def _learn_refusals(self, there: Sequence[Node], now: float) -> None:
        """Which types of nodes are not to be had: Ray's autoscaler would ask for the same one for ever."""
        if sum(node.slots for node in there) >= self.size:
            self._refused = {}
            return
        refused = self.refusals(now - AVOID_S)
        for name in sorted(refused.keys() - self._refused.keys()):
            why = f" ({refused[name][:200]})" if refused[name] else ""
            words = f"{name} is not to be had{why}: other types are asked for, for {AVOID_S:.0f} s"
            self.on_event(Event("fleet", words, data={"type": name}))
        self._refused = refused

    def _tell_idle(self, there: Sequence[Node], now: float) -> None:
        """Nodes that are held, and on which nothing runs."""
        idle = [node.id for node in there if node.slots and node.free == node.slots]
        self._idle_since = {node: self._idle_since.get(node, now) for node in idle}
        for node in idle:
            if now - self._idle_since[node] >= IDLE_S and node not in self._told_idle:
                self._told_idle.add(node)
                words = f"node {node[:8]} is held, and nothing has run there for {IDLE_S:.0f} s"
                self.on_event(Event("idle", words, data={"node": node}))

    def _labels(self, there: Sequence[Node]) -> list[dict[str, str]]:
        """Nodes that are there are asked for by their own type, as what is left goes to types that are not refused."""
        found: list[dict[str, str]] = []
        by_market = {SPOT: self.wanted.spot, ON_DEMAND: self.wanted.on_demand}
        for market, count in ({None: self.size} if self.spec.is_any else by_market).items():
            base = {MARKET: market} if market else {}
            if not self._refused:
                found += [base] * count
                continue
            staying = [node for node in there if node.id not in self.given_back and market in (None, node.market)]
            own = [{**base, TYPE: node.type} if node.type else base for node in staying for _ in range(node.slots)]
            other = {**base, TYPE: f"!in({','.join(sorted(self._refused))})"}
            found += [*own[:count], *[other] * (count - len(own))]
        return found

    def room(self, market: str | None, workers: Mapping[str | None, int]) -> int:
        """Workers that may still be started on nodes of a market, given how many there are by market."""
        if self.spec.is_any or market is None:
            return self.size - sum(workers.values())
        return (self.wanted.spot if market == SPOT else self.wanted.on_demand) - workers.get(market, 0)

    def _decide(self, there: Mapping[str, list[Node]], ready: Mapping[str, int], now: float) -> tuple[Fleet, str]:
        if self.spec.spot_only:
            return spot_only(self.size), ""
        if self.spec.on_demand_floor:
            return on_demand_floor(self.size, self.spec.on_demand_floor), ""
        progress = self._progress(now)
        spot = min(sum(node.slots for node in there[SPOT]), self.size)
        self._short_since = None if spot == self.size else self._short_since or now
        is_patient = self._short_since is not None and now - self._short_since < self.spec.node_start_s
        on_demand = sum(node.slots for node in there[ON_DEMAND] if node.id not in self.given_back)
        expected = self.size if is_patient and not progress.must_hurry else spot
        wanted = by_deadline(self.size, Fleet(expected, on_demand), ready[SPOT], progress)
        work = (
            f"about {progress.left_s:.0f} s of work of the whole fleet are" if self.pace.steps else "unmeasured work is"
        )
        return wanted, f": {work} left, and {progress.deadline_s - progress.elapsed_s:.0f} s to do it"

    def _progress(self, now: float) -> Progress:
        deadline_s = self.spec.deadline_s
        assert deadline_s is not None
        # Before any step was measured the work is unknown: the run is behind, as nothing is done, and need not hurry.
        step_s = self.pace.step_s(self.size) or 1e-9
        return Progress(
            elapsed_s=now - self.work.began,
            deadline_s=deadline_s,
            total_s=self.work.total_steps * step_s,
            done_s=self.pace.done * step_s,
            changeover_s=self.spec.node_start_s + LOOK_S,
        )

    def _give_back(self, nodes: set[str]) -> None:
        for node in sorted(nodes - self.given_back):
            self.on_event(
                Event("fleet", f"node {node[:8]} is given back: {_words(self.wanted)} are wanted", data={"node": node})
            )
        self.given_back = frozenset(nodes)


@dataclass
class AutoscalerRequest:
    """Tells Ray's autoscaler what a run can use; nothing waits for its answer."""

    requester: str
    _sent: Sequence[Mapping[str, str]] | None = None
    _when: float = float("-inf")

    def send(self, resources: Mapping[str, float], labels: Sequence[Mapping[str, str]]) -> None:
        """Ask for a node's room with `resources` for each of `labels`, where that is news or was said long ago."""
        now = time.monotonic()
        if labels == self._sent and now - self._when < REPEAT_S:
            return
        self._sent, self._when = labels, now
        autoscaling: Any = default_autoscaling_coordinator
        autoscaling.get_or_create_autoscaling_coordinator().request_resources.remote(
            requester_id=self.requester,
            resources=[dict(resources) for _ in labels],
            label_selectors=[dict(each) for each in labels],
            expire_after_s=EXPIRES_S,
            priority=autoscaling.ResourceRequestPriority.HIGH,
        )


def _beyond(nodes: list[Node], workers: Mapping[str, int], limit: int) -> list[str]:
    """The nodes that are not needed for so many workers; those with workers are needed first."""
    found, room = [], limit
    for node in sorted(nodes, key=lambda node: (-workers.get(node.id, 0), node.id)):
        if room <= 0:
            found.append(node.id)
        room -= node.slots
    return found


def _words(fleet: Fleet) -> str:
    """`2 spot and 1 on-demand workers`."""
    parts = [f"{count} {market}" for count, market in ((fleet.spot, SPOT), (fleet.on_demand, ON_DEMAND)) if count]
    return f"{' and '.join(parts) or 'no'} worker{'s' if fleet.spot + fleet.on_demand != 1 else ''}"
