"""Messages that the workers and the controller send to the driver."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from undula.state.events import Event


@dataclass(frozen=True)
class Status:
    """Progress of the run."""

    step: int
    """Number of committed steps."""
    total_steps: int
    loss: float
    lr: float
    samples_per_s: float
    """Samples per second, smoothed over recent steps."""
    world_size: int
    seconds_left: float
    """Expected time in seconds until the end of the plan."""
    means: Mapping[str, float] = field(default_factory=dict)
    """Means of the newest validation by name; empty before the first one."""


@dataclass(frozen=True)
class Line:
    """Line that the user's code has printed."""

    rank: int
    text: str


Message: TypeAlias = Status | Event | Line


def clock(seconds: float) -> str:
    """Return a duration as text, such as `0:41`, `12:07` or `3:02:15`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Publisher(Protocol):
    """Callback that sends a message to the driver. It never waits and never fails."""

    def __call__(self, message: Message) -> None: ...
