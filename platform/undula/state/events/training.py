"""Events of the training itself, such as starts, losses, snapshots and checkpoints, which rank 0 reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from undula.state.events.base import Event, counted, figure


@dataclass(frozen=True)
class StartEvent(Event):
    """The ranks of a group have restored their state and enter the training loop."""

    KIND = "start"
    world_size: int
    attempt: int
    origin: str | None = None
    """Source of the restored state, such as "the memory of a worker"; None if the run starts at step 0."""
    cells: int = 1
    """Number of cells, the smallest sets of ranks that run a micro-batch."""
    same_bits: bool = False
    """Whether the run has the same bits at any number of workers whose arithmetic is equal."""
    arithmetic: Mapping[str, str] = field(default_factory=dict)
    """Properties of rank 0 that decide which bits it computes, by name."""
    cores: int | None = None
    """Number of logical processors that rank 0 may use; None if a former version has written the event."""
    step: int = field(kw_only=True)

    @property
    def message(self) -> str:
        did = f"resumed from {self.origin}" if self.origin else "started"
        place = f" at step {self.step}" if self.step else ""
        return f"Training {did}{place} with {counted(self.world_size, 'worker')}."


@dataclass(frozen=True)
class EstimateEvent(Event):
    """What a worker needs by the counts of the script, before any worker has started."""

    KIND = "estimate"
    gpu: str
    """Kind of its GPU."""
    allocated_bytes: float
    """Most memory of the GPU that tensors take in a step."""
    needed_bytes: float
    """Memory that the process takes, with that of CUDA and with a margin."""
    room_bytes: float
    """Memory of the GPU."""
    step_s: dict[str, float] = field(default_factory=dict)
    """Duration of a step in seconds, by number of workers; empty if the rates of the GPU are not known."""

    @property
    def message(self) -> str:
        needed, room = (f"{size / 2**30:.1f} GiB" for size in (self.needed_bytes, self.room_bytes))
        doubt = ", which may be too little" if self.needed_bytes > self.room_bytes else ""
        times = ", ".join(
            f"{seconds:.3g} s with {counted(int(size), 'worker')}" for size, seconds in self.step_s.items()
        )
        step = f", and a step to take {times}" if times else ""
        return f"A worker is expected to need {needed} of the {room} of {self.gpu}{doubt}{step}."


@dataclass(frozen=True)
class MemoryEvent(Event):
    """Peak memory of the first worker after the first steps of a group."""

    KIND = "memory"
    host_bytes: float
    """Largest resident memory of the process, without that of its loader processes."""
    allocated_bytes: float | None = None
    """Most memory that tensors have taken on its GPU; None without a GPU."""
    reserved_bytes: float | None = None
    """Most memory that torch has taken of the GPU; None without a GPU."""

    @property
    def message(self) -> str:
        text = f"The first worker has a peak of {self.host_bytes / 2**30:.2f} GiB of host memory"
        if self.allocated_bytes is None or self.reserved_bytes is None:
            return f"{text}."
        tensors, taken = (f"{size / 2**30:.2f} GiB" for size in (self.allocated_bytes, self.reserved_bytes))
        return f"{text}, and of {tensors} of tensors on its GPU, for which torch holds {taken}."


@dataclass(frozen=True)
class LostEvent(Event):
    """Training repeats steps of a former group that were lost."""

    KIND = "lost"
    steps: int
    """Number of lost steps."""
    step: int = field(kw_only=True)

    @property
    def message(self) -> str:
        verb = "was" if self.steps == 1 else "were"
        return f"Training repeats {counted(self.steps, 'step')} that {verb} lost, from step {self.step} on."


@dataclass(frozen=True)
class BatchEvent(Event):
    """The number of samples per step has changed or differs from the base batch, and the learning rate follows it."""

    KIND = "batch"
    samples: int
    """Number of samples per step."""
    rule: str
    """Name of the rule by which the learning rate follows the batch."""
    factor: float
    """Size of the batch, as a multiple of the base batch."""
    lr_factor: float | None
    """Learning rate at the end of the warm-up, as a multiple of the schedule's; None if the rule measures it."""
    warmup_samples: float = 0.0
    """Length of the warm-up to that learning rate, in samples."""
    batches: int = 1
    """Number of global batches in a step."""

    @property
    def message(self) -> str:
        if self.lr_factor is None:
            rate = f"rule {self.rule} sets the learning rate for {self.factor:g} times the base batch"
        elif self.warmup_samples:
            rate = f"the learning rate is multiplied by {self.lr_factor:g} after {self.warmup_samples:.0f} samples"
        else:
            rate = f"the learning rate is multiplied by {self.lr_factor:g}"
        return f"Each step takes {self.samples} samples, and {rate}."


@dataclass(frozen=True)
class SkipEvent(Event):
    """A step was committed without a change of the weights, because its scaled gradient overflowed."""

    KIND = "skip"
    loss_scale: float
    """Loss scale of the step."""
    next_loss_scale: float
    """Loss scale of the next step."""
    step: int = field(kw_only=True)

    @property
    def message(self) -> str:
        change = f"is lowered from {self.loss_scale:g} to {self.next_loss_scale:g}"
        then = change if self.next_loss_scale != self.loss_scale else f"stays {self.loss_scale:g}"
        return f"Step {self.step} left the weights as they are, because its gradient overflowed in fp16; the loss scale {then}."


@dataclass(frozen=True)
class ValidationEvent(Event):
    """The model was validated."""

    KIND = "validation"
    loss: float
    """Mean loss per sample."""
    samples: int
    """Number of validation samples."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other means per sample that the validation function has returned, by name."""
    step: int = field(kw_only=True)

    @property
    def means(self) -> dict[str, float]:
        """All means by name; that of the loss is "loss"."""
        return {"loss": self.loss, **self.metrics}

    @property
    def message(self) -> str:
        others = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        return f"The validation loss is {self.loss:.4f}" + (f" ({others})." if others else ".")


@dataclass(frozen=True)
class LossEvent(Event):
    """The training loss was averaged. This replaces the validations of a run that has no validation data."""

    KIND = "loss"
    loss: float
    """Mean loss per sample."""
    samples: int
    """Number of samples that were averaged."""
    step: int = field(kw_only=True)

    @property
    def message(self) -> str:
        return f"The mean training loss is {self.loss:.4f}."


@dataclass(frozen=True)
class LogEvent(Event):
    """The script has logged numbers between two steps."""

    KIND = "log"
    values: Mapping[str, int | float]
    """Numbers by name. An integer is one that a float would round."""
    step: int = field(kw_only=True)

    @property
    def message(self) -> str:
        return f"The script logged {', '.join(f'{name} {figure(value)}' for name, value in self.values.items()) or 'nothing'}."


@dataclass(frozen=True)
class SnapshotEvent(Event):
    """The cost of snapshots in memory is known; it is reported once."""

    KIND = "snapshot"
    bytes: int
    """Bytes that snapshots take in the memory of each node."""
    every_steps: int = 1
    """Number of steps between two snapshots."""
    share: float = 0.0
    """Share of the training time that snapshots cost."""

    @property
    def message(self) -> str:
        when = "after every step" if self.every_steps == 1 else f"every {self.every_steps} steps"
        cost = f"{self.bytes / 2**20:.0f} MiB of each node's memory and {self.share:.1%} of the time"
        return f"Snapshots are taken {when} and cost {cost}."


@dataclass(frozen=True)
class CheckpointEvent(Event):
    """A checkpoint was committed."""

    KIND = "checkpoint"
    seconds: float
    """Seconds from the start of the save to its commit."""
    step: int = field(kw_only=True)

    @property
    def message(self) -> str:
        return f"The checkpoint of step {self.step} was committed."


@dataclass(frozen=True)
class StopEvent(Event):
    """The job was stopped before its plan was finished."""

    KIND = "stop"

    @property
    def message(self) -> str:
        return "The job was stopped from outside; submit it again to continue."


@dataclass(frozen=True)
class FailEvent(Event):
    """Training failed, and the job ended."""

    KIND = "fail"
    error: str
    """Failures of all ranks in one line, or the reason for which the job gave up."""

    @property
    def message(self) -> str:
        return f"Training failed: {self.error.rstrip('.')}."


@dataclass(frozen=True)
class EndEvent(Event):
    """The run has committed all steps of its plan, or it has stopped early because a mean of its validations stopped improving."""

    KIND = "end"
    reason: str = ""
    """Reason for which the run stopped early, as a sentence without its full stop; empty if it has committed all steps."""

    @property
    def message(self) -> str:
        if self.step is None:
            return "The run is finished."
        return f"The run finished after {counted(self.step, 'step')}" + (f": {self.reason}." if self.reason else ".")


@dataclass(frozen=True)
class StorageEvent(Event):
    """Requests to a store fail and are repeated. There is one event for an outage, whichever processes of the run it meets."""

    KIND = "storage"
    place: str
    """URL of the bucket."""
    problem: str
    """Failure of one of the requests."""
    limit_s: float
    """Time in seconds after which such a request is given up."""

    @property
    def message(self) -> str:
        problem = self.problem.rstrip(".")
        return f"The run waits for {self.place}, and repeats each request for up to {self.limit_s:.0f} s: {problem}."


@dataclass(frozen=True)
class CacheEvent(Event):
    """The cache of data on a node's disk takes no more data. There is one event for a run and a folder, whichever nodes it meets."""

    KIND = "no_cache"
    folder: str
    host: str
    problem: str
    """Failure of a write."""

    @property
    def message(self) -> str:
        return (
            f"Nothing more is added to the cache in {self.folder} on {self.host}, and the run continues without it: "
            f"{self.problem.rstrip('.')}; make room there, or correct data.cache.folder."
        )


@dataclass(frozen=True)
class TrackerEvent(Event):
    """A tracker is out of reach, or is back. There is one event for each outage, and one for its end."""

    KIND = "tracker"
    tracker: str
    """Name of the tracker."""
    newest: int | None = None
    """Number of the newest step that the tracker has; None if that is not known."""
    problem: str = ""
    """Failure of the tracker; empty if it is back."""

    @property
    def message(self) -> str:
        if not self.problem:
            return f"The tracker {self.tracker} is back and has all steps up to {self.newest}."
        gets = (
            "gets the steps that it lacks"
            if self.newest is None
            else f"has the steps up to {self.newest} and gets the others"
        )
        return f"The tracker {self.tracker} is out of reach, and training continues. It {gets} once it is back: {self.problem.rstrip('.')}."


WarningCode = Literal[
    "checkpoint_skipped", "checkpoint_failed", "last_checkpoint_failed", "checkpoints_not_removed", "no_room", "no_snapshots",
    "no_replicas", "state_at_risk", "no_validation", "no_validation_data", "batch_rule", "other_rates", "mixed_machines",
    "gradient_overflow", "no_finite_gradients", "non_finite_gradient", "node_refused", "unfinished_work", "sync_batch_norm",
    "state_beside_model", "buffer_not_saved", "settings_taken", "settings_kept", "state_in_script",
    "repeated_steps_differ",
]  # fmt: skip
_WARNINGS: Mapping[WarningCode, str] = {
    "checkpoint_skipped": "A damaged checkpoint is not used: {detail}.",
    "checkpoint_failed": "A checkpoint could not be written, and training continues: {detail}.",
    "last_checkpoint_failed": "The last checkpoint could not be written, and the workers keep the final state in memory: {detail}.",
    "no_room": "Later checkpoints may not be written: {detail}.",
    "checkpoints_not_removed": "Old checkpoints could not be deleted, and the next save will try again: {detail}.",
    "no_snapshots": "Snapshots in memory are disabled, so a run that loses all workers resumes from a checkpoint: {detail}.",
    "no_replicas": "The head keeps no replica of the state, so a run that loses a node with a part of the state resumes from a checkpoint: "
    "{detail}.",
    "state_at_risk": "The newest steps will be lost with the last node that holds them, because the head has no room: {detail}.",
    "node_refused": "A worker cannot train on its node, and the run continues without that node: {detail}.",
    "sync_batch_norm": "SyncBatchNorm takes its statistics over the samples of each virtual worker, as BatchNorm does, because over all "
    "workers they would depend on the number of workers: {detail}; use BatchNorm to avoid this message.",
    "state_beside_model": "A step changes {detail}, which is no part of the model: it begins anew after a resume and, if batches "
    "change it, depends on the number of workers; make its module a part of the one that run.model() gets, or keep it in a buffer there.",
    "buffer_not_saved": "A step changes the buffer {detail}, which is registered with persistent=False: no state of the run has it, and it "
    "begins anew after a resume; register it with persistent=True.",
    "settings_taken": "The run goes on with other settings than its state was saved with: {detail}; to have them from the first step on, "
    "start over with --fresh.",
    "settings_kept": "The script gives other settings than before, although it was not submitted again, so that they depend on the workers "
    "or the time; the run keeps those that it began with: {detail}; derive them from run.plan or run.config.",
    "state_in_script": "The script's variable {detail} had changed from step to step, and has begun anew with this group of workers: "
    "validations and later steps that read it differ from those of a run without interruptions; keep it with run.state(), or in a buffer "
    "of the model.",
    "repeated_steps_differ": "A step that the run repeats has another loss than before, so that the run is not that of a fixed cluster: "
    "{detail}. Either the script, its data, its settings or the kind of machine has changed, or something begins anew that the script "
    "keeps itself, such as random numbers, counts, or attributes of its dataset, its model or its optimizer; keep it with run.state(), "
    "in a buffer of the model or in the state of the optimizer.",
    "unfinished_work": "The state after step {detail} is not used, because the group ended while the script worked after step.update() "
    "or had other weights in the model; the run resumes from an older state. With run.state(), a script can repeat such work.",
    "no_validation": "Nothing is validated: there are validation data, but run.steps() was called without validate=; pass validate=.",
    "no_validation_data": "Nothing is validated: the script has a validation function, but there are no validation data; set "
    "data.validation, or give them with the training data in the script.",
    "other_rates": "No group of the optimizer has the learning rate that is shown, because {detail}; pass lr=run.base_lr to the optimizer.",
    "batch_rule": "The batch rule may not suit the optimizer: {detail}.",
    "mixed_machines": "The results may differ in their last bits from those on machines of one kind, because not all workers of the run "
    "compute with the same bits ({detail}); use machines of one kind, with the same settings and the same workers.cpus.",
    "no_finite_gradients": "The gradients of the last {detail} steps were infinite or NaN, so the weights have not changed since; "
    "look for a loss that is not finite, or train in bf16 or fp32.",
    "non_finite_gradient": "The gradient was {detail}, so that the weights may be lost; no checkpoint is written until it is finite again.",
    "gradient_overflow": "The gradient has become infinite or NaN, perhaps because it was too large for {detail}; set it to bf16 or none.",
}


@dataclass(frozen=True)
class WarningEvent(Event):
    """Something did not work as requested, and the run continues."""

    KIND = "warning"
    code: WarningCode
    detail: str = ""
    """Description of the problem."""

    @property
    def message(self) -> str:
        return _WARNINGS[self.code].format(detail=self.detail.rstrip("."))
