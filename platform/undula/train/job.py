"""A job as its workers see it: the parts of its spec that do not mention the cluster."""

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
    """Identity that tells this run from a former one in the same directory."""

    @property
    def noise_every_steps(self) -> int:
        """Steps between measurements of the gradient noise scale: 1 where the learning rate follows it, 0 for none."""
        return 1 if self.schedule.is_measured(self.plan) else self.gradient.noise_every_steps

    @property
    def gradient_scale(self) -> int:
        """Factor by which the step's gradient is larger than the mean over its samples."""
        return self.plan.virtual_workers if self.gradient.reduce == "sum" else 1
