"""What the ledger records of a run: its committed steps, and what happened to it. Plain data, without the library that stores it."""

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepRow:
    """A committed step; fields and units are those of STEP_SCHEMA."""

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
    span: int = 1
    grad_norm: float | None = None
    applied: bool = True
    cells: int = 1

    @property
    def done(self) -> int:
        """Steps of the plan that are committed with it."""
        return self.step + self.span

    @property
    def seconds(self) -> float:
        """That the step took."""
        return self.data_s + self.compute_s + self.communication_s + self.other_s


@dataclass(frozen=True)
class Event:
    """Something that happened to the run, in words for a person and in data for a program."""

    kind: str
    message: str
    step: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "data": json.dumps(self.data)}
