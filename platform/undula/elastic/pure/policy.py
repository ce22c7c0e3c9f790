"""The decision when to change the worker group, and to which workers. Pure: a View goes in, and Hold, Resize or Save comes out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from undula.recovery.progress import ProgressView

SETTLE_S = 1.0
"""Seconds after a notice during which the policy waits for more of them, so that they cost one resize together."""
EXPECTED_INTERVAL_S = 600.0
"""Expected seconds until the cluster changes again, before the run has seen any change."""
EXPECTED_COST_S = 2.0
"""Expected pause of a resize in seconds, before one was measured."""
LEAVE_S = 5.0
"""Seconds before the first deadline of its nodes at which a group that becomes too small checkpoints and stops."""
HANG_FACTOR = 10.0
"""Maximum time without a step before a rank counts as hung, as a multiple of its longest recent step."""
HANG_FLOOR_S = 5.0
"""Smallest value of that time in seconds."""
START_LIMIT_S = 600.0
"""Maximum seconds without a sign from a rank that starts, validates or saves."""


@dataclass(frozen=True)
class WorkerSlot:
    """A worker process that can be in a group."""

    worker: str
    """Id of the worker's actor."""
    node: str
    in_group: bool
    """Whether the worker trains now."""


@dataclass(frozen=True)
class Growth:
    """Weighs the work that more workers would do until the next change against the work that the pause of a resize costs."""

    interval_s: float = EXPECTED_INTERVAL_S
    """Expected seconds until the cluster changes again."""
    cost_s: float = EXPECTED_COST_S
    """Expected pause of a resize in seconds."""

    def pays(self, current: int, wanted: int) -> bool:
        return (wanted - current) * self.interval_s > wanted * self.cost_s

    def describe(self, current: int, wanted: int) -> str:
        return (
            f"{wanted - current} more can train for about {self.interval_s:.0f} s until the next change, "
            f"at the price of a pause of about {self.cost_s:.1f} s"
        )


@dataclass(frozen=True)
class View:
    """The cluster and the group, as the policy sees them."""

    now: float
    """Current time in seconds since the epoch."""
    slots: Sequence[WorkerSlot]
    """Workers of the group, and workers that are ready to join it."""
    deadlines: Mapping[str, float] = field(default_factory=dict)
    """Time at which each node with a notice is removed, in seconds since the epoch; infinity where it is not known."""
    noticed: float = 0.0
    """Time of the newest of these notices, in seconds since the epoch."""
    growth: Growth = field(default_factory=Growth)
    is_saved: bool = False
    """Whether a checkpoint was requested since that notice."""
    step_s: float = 0.0
    """Duration of the longest recent step in seconds."""


@dataclass(frozen=True)
class Hold:
    """Keep training with the same group."""


@dataclass(frozen=True)
class Resize:
    """End the group at its next step boundary, and continue with these workers."""

    workers: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Save:
    """Commit a durable checkpoint at the next step boundary."""

    reason: str
    ends: bool = True
    """Whether the group ends after the checkpoint and waits for nodes, instead of training on."""


Decision = Hold | Resize | Save


def decide(view: View, low: int, high: int, grow: str = "auto") -> Decision:
    """Decide what happens to a group that trains.

    Args:
        view: the cluster and the group.
        low, high: smallest and largest number of workers.
        grow: "auto" if growth must pay for its pause, otherwise "always" or "never".
    """
    group = [slot for slot in view.slots if slot.in_group]
    staying = [slot for slot in group if slot.node not in view.deadlines]
    joining = [slot for slot in view.slots if not slot.in_group and slot.node not in view.deadlines]
    wanted = tuple(slot.worker for slot in [*staying, *joining][:high])
    if len(staying) < len(group):
        deadline = min(view.deadlines[slot.node] for slot in group if slot.node in view.deadlines)
        if view.now - view.noticed < SETTLE_S and deadline - view.now > 5 * SETTLE_S:
            return Hold()
        doomed = f"{len(group) - len(staying)} of {len(group)} workers run on nodes that will be removed"
        if len(wanted) >= low:
            return Resize(wanted, doomed)
        reason = f"{doomed}, which leaves {len(wanted)} of at least {low}"
        last_moment = deadline - LEAVE_S - 3 * view.step_s
        if deadline == inf or view.now >= last_moment:
            return Save(reason)
        return Hold() if view.is_saved else Save(reason, ends=False)
    is_growth = len(wanted) > len(group) and grow != "never"
    if is_growth and (grow == "always" or view.growth.pays(len(group), len(wanted))):
        return Resize(wanted, view.growth.describe(len(group), len(wanted)))
    return Hold()


def hang_limit_s(longest_step_s: float, override_s: float | None) -> float:
    """Maximum seconds without a step before a rank counts as hung.

    Args:
        longest_step_s: duration of the longest recent step; 0 before the first.
        override_s: the job's own limit, if it has one.
    """
    if override_s is not None:
        return override_s
    return max(HANG_FACTOR * longest_step_s, HANG_FLOOR_S) if longest_step_s else START_LIMIT_S


def lost_ranks(ranks: Sequence[ProgressView | None], silent_s: Sequence[float], limit_s: float) -> list[int]:
    """Ranks that make no step and must be treated as lost.

    A rank in a collective waits for other ranks, so it counts as lost only if every rank is in a collective.

    Args:
        ranks: newest progress of each rank; None for a rank that has not reported any.
        silent_s: seconds for which each rank has not answered a poll.
        limit_s: result of `hang_limit_s`.
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
    """Limit for a rank in its current phase; a first step may compile, and so has the longer one."""
    steps = rank.phase in ("compute", "reduce") and rank.longest_step_s > 0
    return limit_s if steps else max(limit_s, START_LIMIT_S)
