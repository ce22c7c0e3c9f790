"""Row of the ledger for a committed step. The module does not import the library that stores the ledger."""

from dataclasses import dataclass

PARTS = ("data_s", "transfer_s", "compute_s", "communication_s", "other_s")
"""Columns that make the duration of a step."""


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
    transfer_s: float = 0.0
    merged_steps: int = 1
    grad_norm: float | None = None
    applied: bool = True
    cells: int = 1
    wait_s: float = 0.0

    @property
    def done(self) -> int:
        """Number of steps of the plan that are committed after this step."""
        return self.step + self.merged_steps

    @property
    def seconds(self) -> float:
        """Duration of the step in seconds."""
        return float(sum(getattr(self, part) for part in PARTS))
