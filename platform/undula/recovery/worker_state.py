"""What a worker process keeps between two worker groups: the state at its last step boundary, and what the controller asks of it.

The controller ends a group by asking its ranks to leave at a step boundary, or a lost rank ends it for all of them. Either way the
process stays, with its imports and its device context, and hands its state to the next group, where it may have another rank.
"""

from dataclasses import dataclass, field
from typing import Any

from undula.recovery.progress import Progress
from undula.recovery.snapshot import Age
from undula.state.pieces import Holding, RankState
from undula.state.records import StepRow


class LeaveGroup(BaseException):
    """Ends the user's train function at a step boundary. It is no Exception, so that no `except Exception` of a script catches it."""


class GroupEndedError(Exception):
    """The group of this rank, which had not met the others for a while, has ended without it."""


@dataclass(frozen=True)
class HeldState:
    """The state of a run as of a step boundary, as this process holds it."""

    plan_digest: str
    attempt: int
    """Number of the attempt whose group committed the step."""
    step: int
    """Number of steps that are in the state."""
    state: RankState
    """This rank's pieces: the tensors of a former group, which nothing changes any more."""
    rows: tuple[StepRow, ...]
    """Rows of the ledger that may not have reached storage."""
    origin: str = "the memory of a worker"
    """Where the state was, for messages."""

    @property
    def age(self) -> Age:
        return self.attempt, self.step

    @property
    def holding(self) -> Holding | None:
        """None where this process has all of the state."""
        return self.state.holding

    def load(self) -> RankState:
        return self.state


@dataclass(frozen=True)
class Request:
    """What the controller wants of a rank at the next step boundary."""

    leaves: bool = False
    """Whether the group is to end there."""
    gives: bool = False
    """Whether one of its ranks will not be in the next group."""
    saves: bool = False
    """Whether a durable checkpoint is to be committed there."""


@dataclass
class WorkerState:
    """What outlives a worker group in a worker process. The process's actor owns it; train functions get it as an argument."""

    controller: Any = None
    """Handle of the actor that stores replicas of snapshots; None under a controller of Ray's own."""
    home: str | None = None
    """Node of that actor."""
    held: HeldState | None = None
    """State that the last group has left here."""
    progress: Progress = field(default_factory=Progress)
    request: Request = Request()
    """What the controller wants of the rank that lives here."""
    own_ports: frozenset[int] = frozenset()
    """Ports that the process listened on before it joined a group."""
    collective_sockets: frozenset[str] = frozenset()
    """Names of Horovod's sockets."""
    is_run: bool = False
    """Whether the train function is a Run's, which can leave at a step boundary."""
    has_reported_snapshots: bool = False
    """Whether an event has told the cost of snapshots since the process started."""
    is_sound: bool = False
    """Whether what ended the last group here was none of this process's doing, such as a lost rank: it is as good as before."""
    is_spent: bool = False
    """Whether this process cannot be in another group."""
    has_ended: bool = False
    """Whether the group has ended, while its train function may still run here."""

    def join_group(self) -> None:
        """Reset what belongs to a group; called before each train function."""
        self.progress = Progress()
        self.is_run = self.is_sound = self.has_ended = False
        self.request = Request()

    def enter(self, phase: str) -> None:
        """Note what the rank does from now on.

        Raises:
            GroupEndedError: the group has ended, and no other rank waits for this one.
        """
        if self.has_ended:
            raise GroupEndedError("the group of this worker has ended")
        self.progress.enter(phase)
