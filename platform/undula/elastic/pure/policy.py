"""When to change the group of workers, and to which workers. Pure: what is seen, now -> Hold | Resize | Save."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from undula.recovery.progress import ProgressView

SETTLE_S = 1.0
"""Two notices that come within this time cost one resize."""
EXPECTED_INTERVAL_S = 600.0
"""Expected time to the next change of a cluster of which nothing is known yet."""
EXPECTED_COST_S = 2.0
"""Expected pause of a resize before one was measured."""
LEAVE_S = 5.0
"""So long before its last node goes a group ends, at a checkpoint."""
HANG_FACTOR = 10.0
HANG_FLOOR_S = 5.0
"""A rank that is this often its longest step without a sign, and at least so long, is lost."""
START_LIMIT_S = 600.0
"""The same where it does not step: while it starts, validates or saves."""


@dataclass(frozen=True)
class WorkerSlot:
    """A worker process that may be in a group."""

    worker: str
    """Its actor's id."""
    node: str
    in_group: bool
    """Whether it trains now."""


@dataclass(frozen=True)
class Growth:
    """Whether it pays to take in more workers: work won until the next change, against work lost in the pause."""

    interval_s: float = EXPECTED_INTERVAL_S
    """Expected time to the next change."""
    cost_s: float = EXPECTED_COST_S
    """Expected pause."""

    def pays(self, current: int, wanted: int) -> bool:
        return (wanted - current) * self.interval_s > wanted * self.cost_s

    def describe(self, current: int, wanted: int) -> str:
        return (
            f"{wanted - current} more for an expected {self.interval_s:.0f} s until the next change, "
            f"for a pause of about {self.cost_s:.1f} s"
        )


@dataclass(frozen=True)
class View:
    """What the policy sees."""

    now: float
    """Seconds since the epoch, as deadlines are."""
    slots: Sequence[WorkerSlot]
    """Workers that answer: those of the group, and those that are ready to join."""
    deadlines: Mapping[str, float] = field(default_factory=dict)
    """Nodes that will go: node -> when; infinity where that is not known."""
    noticed: float = 0.0
    """When the newest of these notices came."""
    growth: Growth = field(default_factory=Growth)
    is_saved: bool = False
    """Whether a checkpoint was asked for since then."""
    step_s: float = 0.0
    """The longest of the last few steps."""


@dataclass(frozen=True)
class Hold:
    """Train on."""


@dataclass(frozen=True)
class Resize:
    """End the group at its next step boundary and go on with these workers."""

    workers: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Save:
    """Commit a durable checkpoint at the next step boundary."""

    reason: str
    ends: bool = True
    """Whether to wait for nodes then, or to train on."""


Decision = Hold | Resize | Save


def decide(view: View, low: int, high: int, grow: str = "auto") -> Decision:
    """What to do with a group that trains.

    Args:
        view: what is seen.
        low, high: fewest and most workers.
        grow: "auto" where growth must pay, "always" or "never".
    """
    group = [slot for slot in view.slots if slot.in_group]
    staying = [slot for slot in group if slot.node not in view.deadlines]
    joining = [slot for slot in view.slots if not slot.in_group and slot.node not in view.deadlines]
    wanted = tuple(slot.worker for slot in [*staying, *joining][:high])
    if len(staying) < len(group):
        deadline = min(view.deadlines[slot.node] for slot in group if slot.node in view.deadlines)
        if view.now - view.noticed < SETTLE_S and deadline - view.now > 5 * SETTLE_S:
            return Hold()
        doomed = f"{len(group) - len(staying)} of {len(group)} workers on nodes that will go"
        if len(wanted) >= low:
            return Resize(wanted, doomed)
        reason = f"{doomed}, {len(wanted)} left, at least {low} needed"
        last_moment = deadline - LEAVE_S - 3 * view.step_s
        if deadline == inf or view.now >= last_moment:
            return Save(reason)
        return Hold() if view.is_saved else Save(reason, ends=False)
    is_growth = len(wanted) > len(group) and grow != "never"
    if is_growth and (grow == "always" or view.growth.pays(len(group), len(wanted))):
        return Resize(wanted, view.growth.describe(len(group), len(wanted)))
    return Hold()


def hang_limit_s(longest_step_s: float, override_s: float | None) -> float:
    """Seconds after which a rank without a sign is lost, of the job's own last steps; 0 where there are none yet."""
    if override_s is not None:
        return override_s
    return max(HANG_FACTOR * longest_step_s, HANG_FLOOR_S) if longest_step_s else START_LIMIT_S


def lost_ranks(ranks: Sequence[ProgressView | None], silent_s: Sequence[float], limit_s: float) -> list[int]:
    """Ranks that make no step, to be treated as lost.

    Args:
        ranks: where each stands, as it last said; None where it never did.
        silent_s: for how long each has not answered.
        limit_s: of `hang_limit_s`.

    A rank that waits in a collective waits for others: it is named only where every rank waits there.
    """
    silent = [rank for rank, seconds in enumerate(silent_s) if seconds > limit_s]
    if silent:
        return silent
    stuck = [number for number, rank in enumerate(ranks) if rank and rank.phase_s > _patience_s(rank, limit_s)]
    outside = [number for number, rank in enumerate(ranks) if rank and rank.phase != "reduce"]
    if outside:
        return [number for number in stuck if number in outside]
    return stuck if len(stuck) == len(ranks) else []


def _patience_s(rank: ProgressView, limit_s: float) -> float:
    """A first step may compile."""
    steps = rank.phase in ("compute", "reduce") and rank.longest_step_s > 0
    return limit_s if steps else max(limit_s, START_LIMIT_S)
