"""The part of a job's spec that says what is kept of its state."""

from typing import Annotated

from annotated_types import Gt
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.plan.plan import STRICT


@checked_dataclass(frozen=True, config=STRICT)
class CheckpointSpec:
    """When checkpoints are taken and how many are kept."""

    every_steps: Annotated[int, Gt(0)] = 100
    """Steps between checkpoints; one more is taken at the end of the run."""
    keep: Annotated[int, Gt(0)] = 2
    """Newest checkpoints that are kept."""
