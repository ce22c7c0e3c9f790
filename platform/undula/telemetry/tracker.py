"""Protocol of experiment trackers, which users can implement for a tracker of their own, and the values that trackers receive."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from undula.storage import Store

RunState: TypeAlias = Literal["finished", "stopped", "failed"]
"""How training ended. `stopped` and `failed` runs continue when their job is submitted again."""


@dataclass(frozen=True)
class TrackedRun:
    """Run as a tracker shows it, which is the same for all submissions of its job."""

    id: str
    """Identifier of the run, of letters and digits. A tracker finds its own record of the run by it."""
    name: str
    url: str
    """Path or URL of the run directory."""
    began: float
    """Time of the first submission in seconds since the epoch."""
    parameters: Mapping[str, str]
    """Settings that never change during the run, by dotted key, such as `plan.global_batch`. Secrets are hidden."""


@dataclass(frozen=True)
class TrackedStep:
    """Committed step of a run, as it was when it was committed first."""

    step: int
    """Number of committed steps, this one included. A validation before the first step has the number 0."""
    time: float
    """Time of the commit in seconds since the epoch."""
    values: Mapping[str, float]
    """Values by name, such as `loss/train`. They may be NaN or infinite. Steps have different names: a step has the means of a validation
    only if it was validated, and what a script logs only if it did."""


class Tracker(Protocol):
    """Experiment tracker that shows a run.

    One thread of the driver calls all methods, so they may take their time: training does not wait for them. If one of them raises an
    exception, the tracker counts as out of reach. The thread then calls `open` again every few seconds, and continues after the steps that
    the tracker has.
    """

    @property
    def name(self) -> str:
        """Name of the tracker in messages."""

    def open(self, run: TrackedRun) -> int | None:
        """Connect to the tracker, and find or create the record of the run there.

        Returns:
            Number of the newest step that the tracker has of the run; None if it has none.
        """

    def send(self, steps: Sequence[TrackedStep]) -> None:
        """Store steps, which are in order and follow those that were stored before. There is at least one.

        If this raises an exception, some of the steps may have been stored. `open` must then return the newest of them, or the same steps
        stored again must count once.
        """

    def close(self, state: RunState) -> None:
        """Note how training ended, and disconnect. A killed driver does not call this."""


@runtime_checkable
class TaggedTracker(Tracker, Protocol):
    """Tracker that shows tags of a run, too."""

    def describe(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run, such as its cost, in place of tags with the same names. Secrets are hidden."""


class LibraryTracker(Tracker, Protocol):
    """Tracker that comes with the library."""

    def check(self) -> None:
        """Check that the tracker has what it needs, such as an extra of the package and credentials. Its server may be out of reach.

        The driver calls this before it records the run, and `undula run` may call it before it starts a local cluster.

        Raises:
            SpecError: Something is missing. If a setting is the reason, the message begins with its key.
        """


@dataclass(frozen=True)
class Entry:
    """What a tracker adds to `undula.telemetry.registry`."""

    make: Callable[[Any, "Store"], LibraryTracker]
    """Callback that returns the tracker of a run, given its settings and the run directory."""
    settings: type | None = None
    """Dataclass of the settings, whose docstring describes the tracker. Without it, the tracker shows all runs."""
