"""Settings of a job that its workers use: the parts of its spec that do not mention the cluster."""

from dataclasses import dataclass, field
from typing import Any, assert_never

from undula.data.script.indexed import ScriptData
from undula.data.spec import DataSpec, ValidationSpec
from undula.parallel.spec import ActivationsSpec, EngineName, GradientSpec
from undula.plan.plan import PlanSpec
from undula.plan.precision import FP32, PrecisionSpec
from undula.plan.schedule import ScheduleSpec
from undula.state.goals import GoalSpec, StopSpec
from undula.state.spec import CheckpointSpec


@dataclass(frozen=True)
class Job:
    """Settings of a job that its workers use."""

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
    precision: PrecisionSpec = FP32
    engine: EngineName = "torch"
    activations: ActivationsSpec = field(default_factory=ActivationsSpec)
    compile: bool = False
    stop: StopSpec | None = None
    script_data: ScriptData | None = None
    """Data that the script gives to the run, as the driver has seen them; None if the job's YAML names the data."""
    run_id: str = ""
    """Identity that distinguishes this run from an earlier run in the same directory."""
    submission: str = ""
    """Identity of the submission, which stands in job.json until the run is submitted again; empty for none."""

    @property
    def compiled(self) -> str | None:
        """Parts of the model that torch compiles; None for none. What it compiles together decides which bits it computes."""
        return ("the model" if self.activations.is_default else "the units of the model") if self.compile else None

    @property
    def goals(self) -> dict[str, GoalSpec]:
        """Goals that need validations, by the key of the setting."""
        found = {"checkpoint.keep_best": self.checkpoint.keep_best, "stop": self.stop.goal if self.stop else None}
        return {key: goal for key, goal in found.items() if goal}

    @property
    def noise_every_steps(self) -> int:
        """Number of steps between measurements of the gradient noise scale; 1 if the learning rate depends on it, 0 for none."""
        return 1 if self.schedule.is_measured(self.plan) else self.gradient.noise_every_steps

    @property
    def gradient_scale(self) -> int:
        """Factor by which the step's gradient is larger than the mean over its samples."""
        match self.gradient.reduce:
            case "average" | "adasum":
                return 1
            case "sum":
                return self.plan.virtual_workers
            case _:
                assert_never(self.gradient.reduce)
