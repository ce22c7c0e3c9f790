"""Records of the ledger: committed steps and events, as plain data that does not depend on the storage library."""

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepRow:
    """A committed step. undula.state.ledger.STEP_SCHEMA documents the fields and their units."""

    attempt: int
    step: int
    epoch: int
    samples: int
    step_samples: int
    world_size: int
    loss: float
    lr: float
    data_s: float
    compute_s: float
    communication_s: float
    other_s: float
    sample_digest: int
    time: float
    logged: str = "{}"
    weights_digest: int | None = None
    blocked_s: float = 0.0
    merged_steps: int = 1
    grad_norm: float | None = None
    applied: bool = True
    cells: int = 1

    @property
    def done(self) -> int:
        """Number of steps of the plan that are committed after this step."""
        return self.step + self.merged_steps

    @property
    def seconds(self) -> float:
        """Duration of the step in seconds."""
        return self.data_s + self.compute_s + self.communication_s + self.other_s


@dataclass(frozen=True)
class Event:
    """Something that happened to the run: a message for people and data for programs."""

    kind: str
    """Stable name of the kind of event; see undula.state.ledger.EVENT_SCHEMA."""
    message: str
    step: int | None = None
    """Number of committed steps when the event happened; None if unknown."""
    data: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
    """Time of the event in seconds since the epoch."""

    def row(self) -> dict[str, Any]:
        """Return the event as a row of the ledger."""
        return {**asdict(self), "data": json.dumps(self.data)}
