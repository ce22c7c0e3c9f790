"""Settings of a job that its workers use. None of them mentions the cluster."""

import dataclasses
from collections.abc import Collection
from dataclasses import field
from typing import Annotated, Any, Self, assert_never

from pydantic import StringConstraints
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.data.script.indexed import ScriptData
from undula.data.script.pickling import Pickled
from undula.data.spec import DataSpec, ValidationSpec
from undula.errors import NAME, STRICT
from undula.parallel.capabilities import Feature, features_of, refusal
from undula.parallel.spec import ActivationsSpec, EngineName, EngineSettings, GradientSpec, ShardingSpec
from undula.plan.plan import Plan, PlanSpec
from undula.plan.precision import PrecisionSpec
from undula.plan.schedule import ScheduleSpec
from undula.state.goals import GoalSpec, StopSpec
from undula.state.spec import CheckpointSpec

Name = Annotated[str, StringConstraints(pattern=NAME)]


@checked_dataclass(frozen=True, config=STRICT)
class JobSettings:
    """Settings of a job that its workers use. A setting is written here once, as a field with the dataclass of the package that owns it."""

    name: Name
    """Name of the run directory below `runs`. A job with the name of a run that exists resumes that run."""
    data: DataSpec = field(default_factory=DataSpec)
    """Data that the job reads; by default the script gives them to `run.dataset()`."""
    engine: EngineName = "torch"
    """Library that reduces the gradients: `torch` (torch.distributed), or `horovod`, which `undula build-horovod` installs."""
    plan: PlanSpec = field(default_factory=PlanSpec)
    """Samples that each step consumes."""
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    """Number format in which the model computes."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """Learning rate over the course of the run."""
    gradient: GradientSpec = field(default_factory=GradientSpec)
    """Reduction and clipping of the gradient before the optimizer's step."""
    sharding: ShardingSpec = field(default_factory=ShardingSpec)
    """Sharding of the model over the workers."""
    activations: ActivationsSpec = field(default_factory=ActivationsSpec)
    """Activations that the forward pass keeps for the backward pass, and where."""
    compile: bool = False
    """Whether torch.compile compiles the forward pass of the model, for each size of micro-batch of the plan. If activations are recomputed
    or offloaded, or if the model is sharded, it compiles the units instead. Nodes need a C++ compiler."""
    validation: ValidationSpec = field(default_factory=ValidationSpec)
    """Interval and size of the validations."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    """Intervals of checkpoints and snapshots, and the number of checkpoints to keep."""
    stop: StopSpec | None = None
    """Early stopping: the run ends after `patience` validations in which the mean `metric` has not improved. By default, the run takes all
    steps of its plan."""
    deterministic: bool = False
    """Whether torch uses only deterministic algorithms, and a comparison of two runs demands equal bits. On GPUs, the weights are the same
    bit for bit at any sequence of world sizes only with this, and steps take longer. On CPUs they are so without it."""

    def __post_init__(self) -> None:
        """Check values that must fit each other. The message of each error begins with the key that it is about."""
        if problem := refusal(self.features):
            raise ValueError(problem)
        self._refuse_unmeasurable_noise()
        if self.sharding.gather == "compute" and self.precision.compute == "fp32":
            raise ValueError(
                "sharding.gather=compute has no effect with precision.compute=fp32; set precision.compute to bf16 or fp16, or remove gather"
            )
        if self.schedule.batch_rule == "legw" and self.schedule.has_warmup and self.plan.batch == "elastic":
            raise ValueError(
                "schedule.batch_rule=legw makes the warmup longer by the factor of the batch, which plan.batch=elastic changes on the way; "
                "set batch_rule=sqrt, which scales the rate alike, or plan.batch=fixed"
            )
        if self.compile and self.activations.keep == "selective":
            raise ValueError(
                "activations.keep=selective cannot be combined with compile=true, which leaves no single operations to keep; set "
                "activations.keep=none, or remove one of them"
            )
        lacks_validation = self.data.validation is None and not self.data.is_of_script
        if lacks_validation and (problem := self.problem_without_validation("data.validation is missing", "set it")):
            raise ValueError(problem)

    def _refuse_unmeasurable_noise(self) -> None:
        """Refuse to measure the gradient noise scale if a step has a single micro-batch.

        The measurement compares the gradients of several micro-batches with their mean.
        """
        plan = self.plan
        if self.schedule.is_measured(plan):
            setting = f"schedule.batch_rule={self.schedule.batch_rule}"
        elif self.gradient.noise_every_steps:
            setting = f"gradient.noise_every_steps={self.gradient.noise_every_steps}"
        else:
            return
        if plan.virtual_workers == 1 and (plan.micro_batch or plan.global_batch) >= plan.global_batch:
            raise ValueError(
                f"{setting} needs at least two micro-batches per step, but a step has one; raise plan.virtual_workers or lower "
                "plan.micro_batch"
            )

    def problem_without_validation(self, reason: str, fix: str) -> str | None:
        """Return why the run cannot go without validations, as a sentence; None if it can.

        Args:
            reason: Reason for which it would.
            fix: What the user can do about it.
        """
        return next((f"{key} needs validations, but {reason}; {fix}, or remove {key}" for key in self.goals), None)

    def problem_with_means(self, means: Collection[str]) -> str | None:
        """Return why goals of the job cannot be judged by the means of a validation, as a sentence; None if they can."""
        for key, goal in self.goals.items():
            if goal.metric not in means:
                return (
                    f"{key} has metric {goal.metric!r}, but the validation function returns {sorted(means)}; set one of these, or return "
                    f"{goal.metric!r} as well"
                )
        return None

    @property
    def features(self) -> set[Feature]:
        """Features that the settings require of an engine; the model may require more."""
        return features_of(self.engine_settings)

    def has_same_bits(self, on_gpus: bool) -> bool:
        """Return whether the job has the same bits at any number of workers."""
        return self.deterministic or not on_gpus

    @property
    def engine_settings(self) -> EngineSettings:
        """Settings that the engine needs."""
        return EngineSettings(
            self.plan.virtual_workers,
            self.engine,
            self.deterministic,
            self.gradient,
            measures_noise=self.noise_every_steps > 0,
            compute=self.precision.compute,
            sharding=self.sharding,
        )

    @property
    def compiled(self) -> str | None:
        """Parts of the model that torch compiles; None for none. What it compiles together decides which bits it computes."""
        return ("the model" if self.activations.is_default else "the units of the model") if self.compile else None

    @property
    def goals(self) -> dict[str, GoalSpec]:
        """Goals that need validations, by the key of the setting."""
        goals = {"stop": self.stop.goal if self.stop else None, "checkpoint.keep_best": self.checkpoint.keep_best}
        return {key: goal for key, goal in goals.items() if goal}

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


@dataclasses.dataclass(frozen=True)
class Job(JobSettings):
    """A job as its workers get it."""

    run_url: str = ""
    """Path or URL of the run directory."""
    config: Any = None
    """Settings of the script."""
    script_data: ScriptData | None = None
    """Data that the script gives to the run, as the driver has seen them; None if the job's YAML names the data."""
    run_id: str = ""
    """Identity that distinguishes this run from an earlier run in the same directory."""
    submission: str = ""
    """Identity of the submission, which stands in job.json until the run is submitted again; empty for none."""
    ends_after: int | None = None
    """Number of steps after which the run ends although its plan has more, as in a smoke test; None for all steps of the plan."""

    def __post_init__(self) -> None:
        """Do nothing, because the settings were checked when they were loaded."""

    def __getstate__(self) -> dict[str, Any]:
        # Classes of the script can be loaded only once a process has executed it.
        return {**vars(self), "config": Pickled.of(self.config)}

    def last_step(self, plan: Plan) -> int:
        """Return the number of steps of a plan after which the run ends."""
        return min(plan.total_steps, self.ends_after or plan.total_steps)

    @classmethod
    def of(cls, settings: JobSettings, **others: Any) -> Self:
        """Return a job with the given settings. `others` has the fields of this class itself."""
        shared = {field.name: getattr(settings, field.name) for field in dataclasses.fields(JobSettings)}
        return cls(**shared, **others)
