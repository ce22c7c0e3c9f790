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
from undula.state.records import Event

LOOK_S = 1.0
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

    def saw(self, step: int, world_size: int, now: float) -> None:
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
    given_back: frozenset[str] = frozenset()
    """Nodes that the run leaves, for the autoscaler to end."""
    labels: Sequence[Mapping[str, str]] = ()
    """That each worker's node is to have, for the autoscaler; one mapping for each worker that is wanted."""
    _looked: float = float("-inf")
    _short_since: float | None = None
    _hurries: bool = False
    _refused: Mapping[str, str] = field(default_factory=dict)
    _unused_since: dict[str, float] = field(default_factory=dict)
    _spot: int = 0
    """Room on spot nodes, as last seen."""
    _told: dict[str, float] = field(default_factory=dict)
    """When it was told of a type that is refused, of a node that is not used, and of a deadline that has passed."""

    def look(self, nodes: Mapping[str, Node], ready: Mapping[str, int], own: Mapping[str, int], now: float) -> None:
        """Decide anew.

        Args:
            nodes: that are alive.
            ready: workers that can train, by node.
            own: all workers of the run, by node.
            now: in seconds since the epoch.
        """
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        staying = [node for node in nodes.values() if node.deadline is None]
        # What others use of a node is no room for this run.
        there = [replace(node, slots=min(node.slots, node.free + own.get(node.id, 0))) for node in staying]
        if not self.spec.is_any:
            self._follow(there, ready, now)
        used = [node for node in there if node.id not in self.given_back]
        if self.has_gpus:
            self._tell_unused(used, now)
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
        wanted, why = self._decide(on, Fleet(counts[SPOT], counts[ON_DEMAND]), now)
        if wanted != self.wanted:
            self.wanted = wanted
            self.on_event(Event("fleet", f"asking for {_words(wanted)}{why}", data=vars(wanted)))
        limits = {SPOT: max(wanted.spot, self.size - counts[ON_DEMAND]), ON_DEMAND: wanted.on_demand}
        self._give_back({node for market, found in on.items() for node in _beyond(found, ready, limits[market])})

    def _decide(self, on: Mapping[str, list[Node]], ready: Fleet, now: float) -> tuple[Fleet, str]:
        if self.spec.on_demand_floor:
            return on_demand_floor(self.size, self.spec.on_demand_floor), ""
        if self.spec.deadline_s is None:
            return spot_only(self.size), ""
        progress = self._progress(self.spec.deadline_s, now)
        if progress.time_left_s < 0:
            late = f"the deadline was {-progress.time_left_s:.0f} s ago"
            words = f"{late}: on spot nodes from now on; to have others, raise workers.fleet.deadline"
            self._tell("deadline", words, now)
            return spot_only(self.size), ""
        spot = min(sum(node.slots for node in on[SPOT]), self.size)
        on_demand = sum(node.slots for node in on[ON_DEMAND] if node.id not in self.given_back)
        if spot > self._spot:  # where one has come, others may follow
            self._short_since = None
        self._spot = spot
        self._short_since = None if spot == self.size else self._short_since or now
        expected = spot
        if self._short_since is not None and now - self._short_since < self.spec.node_start_s:
            expected = self.size  # what is missing may be on its way
        spare = progress.spare_s / progress.changeover_s
        self._hurries = self.pace.steps >= MEASURED_STEPS and (
            spare < (HURRIES_UNTIL if self._hurries else HURRIES_BELOW) and (self._hurries or spot < self.size)
        )
        wanted = by_deadline(self.size, Fleet(expected, on_demand), ready, progress, self._hurries)
        if 0 < expected < self.fewest:  # or they are held, and nothing trains on them
            wanted = Fleet(wanted.spot, max(wanted.on_demand, self.fewest - expected))
        is_known = self.pace.step_s(self.size) is not None
        work = f"about {progress.left_s:.0f} s of work of the whole fleet are" if is_known else "unmeasured work is"
        return wanted, f": {work} left, and {progress.time_left_s:.0f} s to do it"

    def _progress(self, deadline_s: float, now: float) -> RemainingWork:
        # Before steps were measured the work is unknown: the run is behind, as nothing is done, and need not hurry.
        step_s = self.pace.step_s(self.size) or 1e-9
        return RemainingWork(
            elapsed_s=now - self.work.began,
            deadline_s=deadline_s,
            total_s=self.work.total_steps * step_s,
            done_s=self.pace.done * step_s,
            changeover_s=self.spec.node_start_s + LOOK_S,
        )

    def _give_back(self, nodes: set[str]) -> None:
        for node in sorted(nodes - self.given_back):
            words = f"node {node[:8]} is given back: {_words(self.wanted)} are wanted"
            self.on_event(Event("fleet", words, data={"node": node}))
        self.given_back = frozenset(nodes)

    def _learn_refusals(self, used: Sequence[Node], now: float) -> None:
        """Which types of nodes are not to be had: Ray's autoscaler would ask for the same one for ever."""
        rooms = {market: sum(node.slots for node in used if market in (None, node.market)) for market in self._counts()}
        if all(rooms[market] >= count for market, count in self._counts().items()):
            self._refused = {}
            return
        self._refused = self.refusals(now - AVOID_S)
        for name, why in sorted(self._refused.items()):
            reason = f" ({why[:200]})" if why else ""
            words = f"{name} is not to be had{reason}: other types are asked for"
            self._tell(f"refused {name}", words, now, again_s=REFUSED_AGAIN_S)

    def _counts(self) -> dict[str | None, int]:
        """Workers that are wanted by market; None for any."""
        if self.spec.is_any:
            return {None: self.size}
        return {SPOT: self.wanted.spot, ON_DEMAND: self.wanted.on_demand}

    def _tell_unused(self, used: Sequence[Node], now: float) -> None:
        """Room that is held, and that nobody uses."""
        unused = {node.id: node.free for node in used if node.free}
        self._unused_since = {node: self._unused_since.get(node, now) for node in unused}
        for node, free in unused.items():
            if now - self._unused_since[node] >= UNUSED_S:
                words = (
                    f"node {node[:8]} has had room for {free} more worker{'s' if free > 1 else ''} for {UNUSED_S:.0f} s"
                )
                mend = f"the job takes {self.size} at most (workers.max, workers.grow), so let the cluster have less"
                self._tell(f"unused {node}", f"{words}: {mend}", now, kind="idle")

    def _tell(self, what: str, words: str, now: float, kind: str = "fleet", again_s: float = inf) -> None:
        """Tell it once, or again after so long."""
        if what not in self._told or now - self._told[what] >= again_s:
            self._told[what] = now
            self.on_event(Event(kind, words))

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


def _words(fleet: Fleet) -> str:
    """`2 spot and 1 on-demand workers`."""
    parts = [f"{count} {market}" for count, market in ((fleet.spot, SPOT), (fleet.on_demand, ON_DEMAND)) if count]
    return f"{' and '.join(parts) or 'no'} worker{'s' if fleet.spot + fleet.on_demand != 1 else ''}"
