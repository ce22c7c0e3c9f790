"""Policy that decides when to change the worker group, and to which workers. It is a pure function from a View to a Decision."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from undula.recovery.progress import COMPILE_S, START_LIMIT_S, ProgressView
from undula.state.events import StayReason
from undula.state.events.base import counted, short

SETTLE_S = 1.0
"""Seconds after a notice during which the policy waits for further notices, so that all of them cause only one resize."""
EXPECTED_INTERVAL_S = 600.0
"""Expected seconds until the cluster changes, as long as the run has not seen a change."""
EXPECTED_COST_S = 2.0
"""Expected duration in seconds of the pause for a resize, as long as none was measured."""
LEAVE_S = 5.0
"""Lead in seconds: a group that becomes too small makes its last checkpoint and stops this long before the first deadline of its nodes."""
HANG_FACTOR = 10.0
"""Time without a step after which a rank counts as hung, as a multiple of the longest recent step."""
HANG_FLOOR_S = 5.0
"""Minimum of this time in seconds."""
PHASES_IN_A_ROW = 100
"""Number of the longest phases that a rank may go through while others wait for it in a collective, such as parts of a validation of the
script's own, each of which ends with `run.alive()`."""


@dataclass(frozen=True)
class WorkerSlot:
    """Worker process that is in a group or can join one."""

    worker: str
    """Id of the worker's actor."""
    node: str
    in_group: bool
    """Whether the worker trains now."""


@dataclass(frozen=True)
class Growth:
    """Comparison of the work that more workers would do until the cluster's next change with the work that the pause for a resize costs."""

    interval_s: float = EXPECTED_INTERVAL_S
    """Expected seconds until the cluster changes again."""
    cost_s: float = EXPECTED_COST_S
    """Expected duration in seconds of the pause for a resize."""
    changes: int = 1
    """Number of changes of the run, by which its time is divided for the expected interval."""

    def pays(self, current: int, wanted: int) -> bool:
        """Return whether a growth from `current` to `wanted` workers gains more work than its pause costs."""
        return self.interval_s >= wanted * self.cost_s / (wanted - current)

    def pays_in_s(self, current: int, wanted: int) -> float:
        """Return the seconds without a change after which such a growth pays; 0 if it pays now."""
        return max(wanted * self.cost_s / (wanted - current) - self.interval_s, 0.0) * self.changes

    def describe(self, current: int, wanted: int) -> str:
        """Return the reason for a growth, for a message."""
        return (
            f"{wanted - current} more can train until the cluster's next change, expected in about {self.interval_s:.0f} s, "
            f"at the cost of a pause of about {self.cost_s:.1f} s"
        )


@dataclass(frozen=True)
class View:
    """Everything about the cluster and the group that the policy depends on."""

    now: float
    """Current time in seconds since the epoch."""
    slots: Sequence[WorkerSlot]
    """Workers of the group, and workers that are ready to join it."""
    deadlines: Mapping[str, float] = field(default_factory=dict)
    """Time at which each node with a notice will be removed, in seconds since the epoch; infinity if the time is unknown."""
    noticed: float = 0.0
    """Time of the newest of these notices, in seconds since the epoch."""
    growth: Growth = field(default_factory=Growth)
    is_saved: bool = False
    """Whether a checkpoint was requested after the newest notice."""
    step_s: float = 0.0
    """Duration of the longest recent step in seconds."""


@dataclass(frozen=True)
class Hold:
    """Decision to keep training with the same group."""


@dataclass(frozen=True)
class Resize:
    """Decision to end the group at its next step boundary and to continue with other workers."""

    workers: tuple[str, ...]
    """Ids of the workers in the next group."""
    reason: str
    until: float = inf
    """Time in seconds since the epoch until which the resize can wait for a checkpoint that is being written."""


@dataclass(frozen=True)
class Save:
    """Decision to commit a checkpoint at the next step boundary."""

    reason: str
    ends: bool = True
    """Whether the group ends after the checkpoint and the run waits for nodes, instead of continuing to train."""


Decision = Hold | Resize | Save


def decide(view: View, low: int, high: int, grow: str = "auto") -> Decision:
    """Decide whether a group that trains continues, is resized or saves a checkpoint.

    Args:
        view: Present state of the cluster and the group.
        low, high: Minimum and maximum number of workers.
        grow: Policy for growth, which is "always", "never", or "auto" if a growth must gain more work than its pause costs.
    """
    group = [slot for slot in view.slots if slot.in_group]
    staying = [slot for slot in group if slot.node not in view.deadlines]
    joining = [slot for slot in view.slots if not slot.in_group and slot.node not in view.deadlines]
    wanted = tuple(slot.worker for slot in [*staying, *joining][:high])
    if len(staying) < len(group):
        deadline = min(view.deadlines[slot.node] for slot in group if slot.node in view.deadlines)
        if view.now - view.noticed < SETTLE_S and deadline - view.now > 5 * SETTLE_S:
            return Hold()
        leaving = len(group) - len(staying)
        doomed = f"{leaving} of {counted(len(group), 'worker')} run{'s' * (leaving == 1)} on nodes that will be removed"
        last_moment = view.now if deadline == inf else deadline - LEAVE_S - 3 * view.step_s
        if len(wanted) >= low:
            new = {slot.node for slot in joining if slot.worker in wanted}
            old = {slot.node for slot in group if slot.node in view.deadlines}
            moves = f"{counted(leaving, 'worker')} move{'s' * (leaving == 1)} from {_named(old)}, which will be removed, to {_named(new)}"
            return Resize(wanted, moves if len(wanted) == len(group) else doomed, last_moment)
        reason = f"{doomed}, which leaves {len(wanted)}, and the job needs at least {low}"
        if view.now >= last_moment:
            return Save(reason)
        return Hold() if view.is_saved else Save(reason, ends=False)
    is_growth = len(wanted) > len(group) and grow != "never"
    if is_growth and grow == "always":
        return Resize(wanted, "workers are ready, and workers.grow is always")
    if is_growth and view.growth.pays(len(group), len(wanted)):
        return Resize(wanted, view.growth.describe(len(group), len(wanted)))
    return Hold()


def _named(nodes: Iterable[str]) -> str:
    """Return the nodes with their short names, such as `node 1088cede` or `nodes 1088cede and 2f3a9b1c`."""
    names = sorted(map(short, nodes))
    return f"node{'s' * (len(names) > 1)} {' and '.join(names)}"


def reason_to_stay(view: View, high: int, grow: str, starting: int) -> StayReason | None:
    """Return why a group that continues has fewer workers than it may have; None if it has them all, or if that is about to change.

    Args:
        view: Present state of the cluster and the group.
        high: Maximum number of workers.
        grow: Policy for growth.
        starting: Number of workers that are starting, of which another event tells.
    """
    if sum(slot.in_group for slot in view.slots) >= high or view.deadlines:
        return None
    if grow == "never":
        return "never"
    if not all(slot.in_group for slot in view.slots):
        return "pause"
    return None if starting else "room"


def hang_limit_s(longest_step_s: float, override_s: float | None) -> float:
    """Return the time without a step, in seconds, after which a rank counts as hung.

    Args:
        longest_step_s: Duration of the longest recent step in seconds; 0 before the first step.
        override_s: Limit that the job sets, in seconds; None if it sets none.
    """
    if override_s is not None:
        return override_s
    return max(HANG_FACTOR * longest_step_s, HANG_FLOOR_S) if longest_step_s else START_LIMIT_S


def collective_limit_s(override_s: float | None) -> float:
    """Return the time limit of collectives in seconds, which must not end a wait before a hung rank is found: the controller watches them.

    Args:
        override_s: Limit of a hang that the job sets, in seconds; None if it sets none.
    """
    return PHASES_IN_A_ROW * (max(override_s or 0.0, START_LIMIT_S) + COMPILE_S)


def limiting_step_s(ranks: Iterable[ProgressView], former_s: float, was_hung: bool) -> float:
    """Return the duration in seconds of the step that the limit of a hang follows: the longest recent one.

    Once a rank has counted as hung, it is the longest of all: some steps may take longer than others without any hang, and the next one of
    them must not cost a worker again.

    Args:
        ranks: Newest progress of the ranks.
        former_s: Former result, which counts until a new group has committed a step.
        was_hung: Whether a rank of the run has counted as hung.
    """
    if was_hung:
        return max([former_s, *(rank.slowest_step_s for rank in ranks)])
    return max((rank.longest_step_s for rank in ranks), default=0.0) or former_s


def lost_ranks(ranks: Sequence[ProgressView | None], silent_s: Sequence[float], limit_s: float) -> list[int]:
    """Return the ranks that make no progress and must be treated as lost.

    A rank that may be waiting for other ranks counts as lost only if all ranks may be waiting. As long as one of them does work of its
    own, the others wait for it, or will do so soon.

    Args:
        ranks: Newest progress of each rank; None for a rank that has not reported any.
        silent_s: Seconds for which each rank has not answered a poll. Its newest progress is at least that old.
        limit_s: Result of `hang_limit_s`.
    """
    if silent := silent_ranks(ranks, silent_s, limit_s):
        return silent
    known = [rank for rank in ranks if rank]
    hung = [
        number
        for number, rank in enumerate(ranks)
        if rank and not rank.phase.may_wait and rank.phase_s > patience_s(rank, limit_s)
    ]
    if len(known) < len(ranks) or any(not rank.phase.may_wait for rank in known):
        return hung
    # A rank that has not answered lately may have gone on since, so all must have waited for that much longer.
    age_s = max(silent_s, default=0.0)
    are_stuck = all(rank.phase_s > patience_s(rank, limit_s) + age_s for rank in known)
    return list(range(len(ranks))) if are_stuck else []


def silent_ranks(ranks: Sequence[ProgressView | None], silent_s: Sequence[float], limit_s: float) -> list[int]:
    """Return the ranks that have not answered for too long. The arguments are those of `lost_ranks`.

    A process does not answer while a thread copies many bytes and holds Python's lock.
    """
    allowed_s = [rank.allowed_s if rank else 0.0 for rank in ranks]
    return [number for number, seconds in enumerate(silent_s) if seconds > limit_s + allowed_s[number]]


def patience_s(rank: ProgressView, limit_s: float) -> float:
    """Return the time limit in seconds for a rank's current phase.

    The first step has the longer limit, because it may include compilation.

    Args:
        rank: Progress of the rank.
        limit_s: Result of `hang_limit_s`.
    """
    is_brief = rank.phase.is_brief and rank.longest_step_s > 0
    return (limit_s if is_brief else max(limit_s, START_LIMIT_S)) + rank.allowed_s
