"""What a worker process keeps between two worker groups: the state at its last step boundary, and what the controller asks of it.

The controller ends a group by asking its ranks to leave at a step boundary, or a lost rank ends it for all of them. Either way the
process stays, with its imports and its device context, and hands its state to the next group, where it may have another rank.
"""

from dataclasses import dataclass, field
from typing import Any

from undula.recovery.progress import Progress
from undula.recovery.snapshot import Age
from undula.state.pieces import RankState, Sharding
from undula.state.records import StepRow


class LeaveGroup(BaseException):
    """Ends the user's train function at a step boundary; no Exception, so that no `except Exception` of a script holds it up."""


class GroupEndedError(Exception):
    """The group of a rank that had not met the others for a while has ended without it."""


@dataclass(frozen=True)
class Kept:
    """A run as of a step boundary."""

    plan_digest: str
    attempt: int
    """Of the group that committed it."""
    step: int
    """Steps that are in the state."""
    state: RankState
    """What this rank had of it; the tensors of a former group, which nothing changes any more."""
    rows: tuple[StepRow, ...]
    """Rows of the ledger that may not have reached storage."""
    origin: str = "the memory of a worker"
    """In words."""

    @property
    def age(self) -> Age:
        return self.attempt, self.step

    @property
    def sharding(self) -> Sharding | None:
        """None where every tensor is whole."""
        return self.state.sharding

    def load(self) -> RankState:
        return self.state


@dataclass(frozen=True)
class Request:
    """What the controller wants of a rank at the next step boundary."""

    leaves: bool = False
    """The group is to end there."""
    gives: bool = False
    """One of its ranks will not be in the next group."""
    saves: bool = False
    """A durable checkpoint is to be committed there."""


@dataclass
class Process:
    """The state of this worker process that outlives a worker group."""

    controller: Any = None
    """The actor that keeps copies of snapshots; None under a controller of Ray's own."""
    home: str | None = None
    """Its node."""
    kept: Kept | None = None
    progress: Progress = field(default_factory=Progress)
    request: Request = Request()
    """Of the controller."""
    own_ports: frozenset[int] = frozenset()
    """That it listened on before it joined a group."""
    collective_sockets: frozenset[str] = frozenset()
    """Horovod's, by name."""
    is_run: bool = False
    """Whether the train function is a Run's, which can leave at a step boundary."""
    has_told_snapshots: bool = False
    """Whether a run's cost of snapshots was told from here."""
    is_sound: bool = False
    """Whether what ended the last group here was none of this process's doing, such as a lost rank: it is as good as before."""

    is_spent: bool = False
    """Whether this process cannot be in another group."""

    has_ended: bool = False
    """Whether the group has ended, while its train function may still run here."""

    def join_group(self) -> None:
        """Called before each train function."""
        self.progress = Progress()
        self.is_run = self.is_sound = self.has_ended = False
        self.request = Request()

    def enter(self, phase: str) -> None:
        """Called in the loop wherever the rank does something else.

        Raises:
            GroupEndedError: nobody waits for it any more.
        """
        if self.has_ended:
            raise GroupEndedError("the group of this worker has ended")
        self.progress.enter(phase)


process = Process()
