"""Data that a worker process keeps between two worker groups, such as the state of the run at the last step boundary.

A group ends when the controller asks its ranks to leave at a step boundary, or when a rank is lost. In both cases the remaining processes
keep their imports and their device contexts, and pass their state to the next group, in which they may have other ranks.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from undula.recovery.progress import Phase, Progress
from undula.recovery.snapshot import Age
from undula.state.pieces import Holding, RankState
from undula.state.records import StepRow

Kept = TypeVar("Kept")
WORKER_MEMORY = "the memory of a worker"
"""Origin of a state that a process holds."""


class LeaveGroup(BaseException):
    """Ends the user's train function at a step boundary. It is not an Exception, so an `except Exception` in a script does not catch it."""


class GroupEndedError(Exception):
    """The group has ended without this rank, which had not joined a collective for a while."""


class LostLeaverError(GroupEndedError):
    """A worker was lost from which this rank was getting a part of the state. Another group can start without it."""


@dataclass(frozen=True)
class HeldState:
    """State of a run at a step boundary, as this process holds it."""

    plan_digest: str
    attempt: int
    """Number of the attempt whose group committed the step."""
    step: int
    """Number of steps that the state includes."""
    state: RankState
    """Pieces of this rank: tensors of a former group, which nothing changes any more."""
    rows: tuple[StepRow, ...]
    """Rows of the ledger that may not have reached storage."""
    origin: str = WORKER_MEMORY
    """Place where the state is, for messages."""
    updates: "tuple[HeldState, ...]" = ()
    """Update of the optimizer that was to follow, if the group broke in its commit, as `recovery.replay` records it."""

    @property
    def values(self) -> Mapping[str, Any]:
        return self.state.values

    @property
    def age(self) -> Age:
        return self.attempt, self.step

    @property
    def holding(self) -> Holding | None:
        """Extent of this process's pieces; None if it holds the whole state."""
        return self.state.holding

    @property
    def shards(self) -> set[str]:
        """Names of the tensors of which this process has a shard."""
        return self.state.shards

    def load(self) -> RankState:
        return self.state


@dataclass(frozen=True)
class Request:
    """Request of the controller to a rank, for the next step boundary."""

    leaves: bool = False
    """Whether to leave the group there."""
    saves: bool = False
    """Whether to commit a checkpoint there."""
    until: float = inf
    """Time in seconds since the epoch until which leaving can wait for a checkpoint that is being written."""


@dataclass
class WorkerState:
    """Data of a worker process that outlives its worker groups. The actor of the process owns it and passes it to each train function."""

    controller: Any = None
    """Handle of the actor that stores replicas of snapshots; None if the controller is Ray's own."""
    home: str | None = None
    """Id of the node on which that actor runs; None if there is no such actor."""
    held: HeldState | None = None
    """State that the last group left in this process; None if there is none."""
    progress: Progress = field(default_factory=Progress)
    request: Request = Request()
    """Latest request of the controller to the rank in this process."""
    own_ports: frozenset[int] = frozenset()
    """Ports on which the process listened before it joined a group."""
    collective_sockets: frozenset[str] = frozenset()
    """Names of the sockets that Horovod has opened."""
    shares_state: bool = False
    """Whether the ranks of the last group held different parts of the state."""
    is_run: bool = False
    """Whether the train function uses a Run, which can leave the group at a step boundary."""
    owes_save: bool = False
    """Whether a checkpoint was due but has not begun."""
    reported_failure: str = ""
    """Failure of the last checkpoint that an event has reported; empty if the last checkpoint was written."""
    has_reported_snapshots: bool = False
    """Whether an event has reported the cost of snapshots since the process started."""
    is_sound: bool = False
    """Whether the last group ended for a reason outside this process, such as a lost rank, so that the process can join another group."""
    is_spent: bool = False
    """Whether this process cannot join another group."""
    script_record: Any = None
    """What `train.script_variables` has noted about the variables of the script in the last group; None for nothing."""
    failure: BaseException | None = None
    """Exception that the train function of the last group raised, set before that group's collectives are shut down."""
    deadlock: str | None = None
    """Sentence about a deadlock that the script has made, because of which the controller has aborted the group's collectives."""
    has_ended: bool = False
    """Whether the group has ended. Its train function may still be running in this process."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Objects that `keep` has made, by name."""
    closing: ExitStack = field(default_factory=ExitStack)
    """Functions that close kept objects."""

    def join_group(self) -> None:
        """Reset the data of a single group. Called before each train function."""
        self.progress = Progress()
        self.is_run = self.is_sound = self.has_ended = False
        self.failure = self.deadlock = None
        self.request = Request()

    def keep(self, name: str, make: Callable[[], Kept], close: Callable[[Kept], None] | None = None) -> Kept:
        """Return the object that an earlier group of this process has made under a name; if there is none, make and keep it.

        Args:
            name: Name of the object.
            make: Function that makes it.
            close: Function that `close_kept` calls with it; None for none.
        """
        if name not in self.kept:
            self.kept[name] = made = make()
            if close is not None:
                self.closing.callback(close, made)
        return self.kept[name]  # type: ignore[no-any-return]

    def close_kept(self) -> None:
        """Close and free the kept objects, because no other group will need them."""
        self.kept.clear()
        self.closing.close()

    def enter(self, phase: Phase, allowed_s: float = 0.0) -> None:
        """Record the phase that the rank enters.

        Args:
            phase: The phase.
            allowed_s: Seconds by which its limit is longer, because of the bytes that it moves.

        Raises:
            GroupEndedError: The group has ended, and no other rank waits for this one.
        """
        if self.has_ended:
            raise GroupEndedError("the group of this worker has ended")
        self.progress.enter(phase, allowed_s)
