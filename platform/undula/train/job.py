"""What a worker is told of the job: the parts of its spec that do not speak of the cluster."""

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Gt
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.data.spec import DataSpec
from undula.parallel.spec import EngineName, GradientSpec
from undula.plan.plan import STRICT, PlanSpec
from undula.plan.schedule import ScheduleSpec
from undula.state.spec import CheckpointSpec


@checked_dataclass(frozen=True, config=STRICT)
class ValidationSpec:
    """When and on how much the job validates."""

    every_steps: Annotated[int, Gt(0)] = 100
    """Steps between validations; one more is made before the first step and after the last."""
    samples: Annotated[int, Gt(0)] | None = None
    """Samples of a validation, rounded up to whole steps and spread over the validation data; by default all."""


@dataclass(frozen=True)
class Job:
    """A job as its workers see it."""

    name: str
    run_url: str
    data: DataSpec
    plan: PlanSpec
    schedule: ScheduleSpec
    gradient: GradientSpec
    validation: ValidationSpec
    checkpoint: CheckpointSpec
    deterministic: bool
    config: Any
    engine: EngineName = "torch"
    run_id: str = ""
    """Tells this run from a former one in the same directory."""
