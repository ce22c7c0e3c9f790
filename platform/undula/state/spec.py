"""The part of a job's spec that says what is kept of its state."""

from typing import Annotated

from annotated_types import Ge, Gt
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.plan.plan import STRICT


@checked_dataclass(frozen=True, config=STRICT)
class CheckpointSpec:
    """When checkpoints are taken and how many are kept."""

    every_steps: Annotated[int, Gt(0)] = 100
    """Steps between checkpoints; one more is taken at the end of the run."""
    snapshot_every_steps: Annotated[int, Ge(0)] | None = None
    """Steps between snapshots in the memory of the workers' nodes, from which a run goes on when all its workers were lost; by default
    as many as keep their cost under 1 % of the time; 0 for none."""
    keep: Annotated[int, Gt(0)] = 2
    """Newest checkpoints that are kept."""
