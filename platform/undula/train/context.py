"""State of a run on a rank, which the training loop, its steps and their boundaries share."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from undula.data.planned import Data
from undula.data.reader import SampleReader
from undula.data.stored.mixture import load_data
from undula.parallel.collectives import all_reduce_over
from undula.parallel.engines.engine import Engine
from undula.parallel.layout import Layout, timeout_of
from undula.plan.plan import MicroBatch, Plan
from undula.recovery.baseline import Baseline
from undula.recovery.live_state import LiveState
from undula.recovery.rank_snapshots import RankSnapshots
from undula.recovery.replica import ReplicaClient
from undula.recovery.worker_state import WorkerState
from undula.state.attempts import Lineage, claim
from undula.state.checkpoint import Checkpointer
from undula.state.directory import require_newest_submission
from undula.state.events import CheckpointEvent, Event, WarningEvent
from undula.state.goals import ValidationResults
from undula.state.ledger import recorded_attempts
from undula.state.records import StepRow
from undula.storage import Store, open_store
from undula.telemetry.messages import Publisher
from undula.telemetry.reporter import Telemetry
from undula.train.arithmetic import STATE, arithmetic_of
from undula.train.buffers import BufferMean
from undula.train.device_batches import DeviceBatches
from undula.train.job import Job
from undula.train.learning_rate import OptimizerRates, Rate, rate_for
from undula.train.loss_scale import LossScale
from undula.train.noise_scale import NoiseScaleMeter
from undula.train.samples import SampleSource
from undula.train.script_guard import ScriptGuard
from undula.train.script_state import ScriptState
from undula.train.step_reduction import StepReducer, Wants

Kind: TypeAlias = tuple[tuple[int, ...], ...]
"""Shapes of the tensors of a batch, and the number of parameters that train on it."""


@dataclass(frozen=True)
class RunSetup:
    """Parts of a run that a rank knows before the script has made its model."""

    job: Job
    layout: Layout
    worker: WorkerState
    publish: Publisher
    replicas: ReplicaClient | None
    """Client of the controller's replica store; None with Ray Train's own controller."""
    store: Store
    """Storage of the run directory."""
    data: Data
    plan: Plan
    plan_digest: str
    """Digest of the plan and the data."""
    attempt: int
    """Number of this attempt, the same on every rank."""
    before: Lineage
    """Parts of the work of earlier attempts that belong to the run."""

    @classmethod
    def of(
        cls, job: Job, layout: Layout, worker: WorkerState, publish: Publisher, replicas: ReplicaClient | None
    ) -> "RunSetup":
        """Find out the run's data and read its directory, and claim the number of an attempt. All ranks must call this.

        Raises:
            SupersededError: The run was submitted again.
        """
        store = open_store(job.run_url)
        data: Data = job.script_data.training if job.script_data else load_data(job.data)
        plan = Plan(job.plan, data.num_rows)
        held = [0] * layout.world_size
        dist.all_gather_object(held, worker.held.age[0] if worker.held else 0, group=layout.control)
        claimed: list[tuple[int, Lineage] | None] = [None]
        if layout.is_first:
            require_newest_submission(store, job.submission)
            claimed = [claim(store, recorded_attempts(store), max(held))]
        dist.broadcast_object_list(claimed, group=layout.control, group_src=0)
        assert claimed[0] is not None
        return cls(
            job,
            layout,
            worker,
            publish,
            replicas,
            store,
            data,
            plan,
            plan.digest(data.digest, job.precision),
            *claimed[0],
        )

    @property
    def virtual_workers(self) -> range:
        """Virtual workers of this rank's cell."""
        return self.layout.virtual_workers(self.job.plan.virtual_workers)

    def work(self, index: int, merged_steps: int) -> list[MicroBatch]:
        """Return the micro-batches of this rank in steps of the plan that are taken as one."""
        return self.plan.work(range(index, index + merged_steps), self.virtual_workers)

    def padded_work(self, index: int, merged_steps: int, equal_rounds: bool) -> list[MicroBatch]:
        """Return the micro-batches that this rank runs.

        A rank without a share of a short step runs a micro-batch of weight zero. If all ranks must run the same number of micro-batches,
        a rank runs one of weight zero for each that it lacks. Such a micro-batch has two rows, because some layers, such as BatchNorm,
        cannot train on one row.
        """
        work = self.work(index, merged_steps)
        rounds = self.layout.rounds(self.plan, range(index, index + merged_steps)) if equal_rounds else 1
        return work + [MicroBatch(index, self.virtual_workers[0], 0, 0)] * (rounds - len(work))


@dataclass
class TrainContext:
    """State of a run on a rank while it trains."""

    setup: RunSetup
    engine: Engine
    model: nn.Module
    """Module that the script calls."""
    optimizer: torch.optim.Optimizer
    buffers: BufferMean
    baseline: Baseline
    guard: ScriptGuard
    noise: NoiseScaleMeter
    loss_scale: LossScale
    rates: OptimizerRates
    live: LiveState
    checkpoints: Checkpointer
    reducer: StepReducer
    rate: Rate
    results: ValidationResults
    samples: SampleSource
    """Source of this rank's samples."""
    script_state: ScriptState
    warnings: tuple[WarningEvent, ...] = ()
    """Warnings about the model, which are reported when the run begins."""
    stream: SampleReader | None = None
    """Training samples from the restored step on."""
    batches: DeviceBatches | None = None
    """Micro-batches from `stream`, on the device."""
    snapshots: RankSnapshots | None = None
    telemetry: Telemetry | None = None
    """Destination of rank 0's reports; None on other ranks."""
    committed: int | None = None
    """Number of committed steps; None before the state is restored, and while the optimizer changes it."""
    committed_by: int = 0
    """Number of the attempt that committed the last of these steps. A state has the age under which it was committed, because this attempt
    may fail before it has recorded that it begins."""
    rows: list[StepRow] = field(default_factory=list)
    """Rows of the ledger that may not have reached storage."""
    wants: Wants = field(default_factory=Wants)
    """Requests that the ranks agreed on at the last commit."""
    has_overflowed: bool = False
    """Whether the run has reported that the compression of gradients may have made them infinite."""
    known_kinds: set[Kind] = field(default_factory=set)
    """Kinds of batches with which this group has committed a step."""
    step_s: float = 0.0
    """Duration of the last step in seconds."""
    blocked_s: float = 0.0
    """Time in seconds for which checkpoints have blocked the training since the last step."""

    @classmethod
    def of(
        cls,
        setup: RunSetup,
        engine: Engine,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rates: OptimizerRates,
        samples: SampleSource,
        script_state: ScriptState,
    ) -> "TrainContext":
        """Return the state of a run that has not restored anything yet."""
        job, layout = setup.job, setup.layout
        arithmetic = {STATE: arithmetic_of(layout.device, job.compiled)} if job.deterministic else {}
        noise = NoiseScaleMeter(job.noise_every_steps, job.gradient_scale)
        loss_scale = LossScale(job.precision)
        rate, _ = rate_for(job.schedule, setup.plan, layout.num_cells, 0, {})
        results, baseline = ValidationResults(), Baseline(engine.module, optimizer)

        def beside() -> dict[str, Any]:
            return {
                **engine.state(),
                **noise.state(),
                **loss_scale.state(),
                **context.rate.values(),
                **rates.values(),
                **results.values(),
                **script_state.values(),
                **arithmetic,
            }

        def flush() -> None:
            if context.telemetry:
                context.telemetry.flush()

        def report_saved(done: int, seconds: float) -> None:
            context.report(CheckpointEvent(seconds, step=done))

        def not_removed(reason: str) -> None:
            context.report(WarningEvent("checkpoints_not_removed", reason))

        context = cls(
            setup,
            engine,
            model,
            optimizer,
            BufferMean(engine.module, all_reduce_over(layout.shards), job.deterministic, is_first=layout.cell == 0),
            baseline,
            ScriptGuard(engine, model, optimizer, baseline),
            noise,
            loss_scale,
            rates,
            LiveState(model, optimizer, beside),
            Checkpointer(
                setup.store,
                layout.control,
                setup.attempt,
                job.checkpoint.keep,
                flush,
                report_saved,
                not_removed,
                setup.before,
                job.checkpoint.keep_best,
                timeout_of(layout.control),
            ),
            StepReducer(layout.control),
            rate,
            results,
            samples,
            script_state,
        )
        return context

    def report(self, event: Event) -> None:
        """Report an event of the run. Only the events of rank 0 reach the ledger."""
        if self.telemetry:
            self.telemetry.event(event)
