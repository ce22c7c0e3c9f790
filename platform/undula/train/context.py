"""What the loop, its steps and their boundaries share: the run as this rank trains it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from undula.data.mixture import Data, load_data
from undula.data.streams import SampleStream
from undula.parallel.engines.engine import Engine
from undula.parallel.layout import Layout
from undula.plan.plan import Plan
from undula.recovery.live_state import LiveState
from undula.recovery.rank_snapshots import RankSnapshots
from undula.recovery.replica import ReplicaClient
from undula.recovery.worker_state import WorkerState
from undula.state.checkpoint import Checkpointer
from undula.state.events import Event
from undula.state.ledger import next_attempt
from undula.state.records import StepRow
from undula.storage import Store, open_store
from undula.telemetry.messages import Publisher
from undula.telemetry.reporter import Telemetry
from undula.train.buffers import BufferMean
from undula.train.job import Job
from undula.train.learning_rate import GroupRates, Rate
from undula.train.noise_scale import NoiseScaleMeter
from undula.train.step_reduction import StepReducer, Wants


@dataclass(frozen=True)
class RunSetup:
    """What is known of a run on a rank before the script has made its model."""

    job: Job
    layout: Layout
    worker: WorkerState
    publish: Publisher
    replicas: ReplicaClient | None
    """Client of the controller's replica store; None under a controller of Ray's own."""
    store: Store
    """The run directory."""
    data: Data
    plan: Plan
    plan_digest: str
    """Identity of the logical run."""
    attempt: int
    """Number of this attempt, the same on every rank."""

    @classmethod
    def of(
        cls, job: Job, layout: Layout, worker: WorkerState, publish: Publisher, replicas: ReplicaClient | None
    ) -> "RunSetup":
        """Look at the run's data and directory. All ranks call it."""
        store, data = open_store(job.run_url), load_data(job.data)
        plan = Plan(job.plan, data.num_rows)
        attempt: list[int] = [next_attempt(store) if layout.is_first else 0]
        dist.broadcast_object_list(attempt, group=layout.control, group_src=0)
        return cls(job, layout, worker, publish, replicas, store, data, plan, plan.digest(data.digest), attempt[0])

    @property
    def virtual_workers(self) -> range:
        """The virtual workers of this rank's cell."""
        return self.layout.virtual_workers(self.job.plan.virtual_workers)


@dataclass
class TrainContext:
    """A run on a rank while it trains."""

    setup: RunSetup
    engine: Engine
    model: nn.Module
    """The module that the script calls."""
    optimizer: torch.optim.Optimizer
    buffers: BufferMean
    noise: NoiseScaleMeter
    group_rates: GroupRates
    live: LiveState
    checkpoints: Checkpointer
    reducer: StepReducer
    rate: Rate
    open_stream: Callable[[int], SampleStream]
    """Opens the stream of this rank's samples at a step."""
    stream: SampleStream | None = None
    snapshots: RankSnapshots | None = None
    telemetry: Telemetry | None = None
    """Where rank 0 reports; None on other ranks."""
    committed: int | None = None
    """Number of committed steps; None while the optimizer steps, when the state is between two steps."""
    rows: list[StepRow] = field(default_factory=list)
    """Rows of the ledger that may not have reached storage."""
    wants: Wants = field(default_factory=Wants)
    """What the ranks agreed on at the last commit."""
    step_s: float = 0.0
    """Seconds that the last step took."""
    blocked_s: float = 0.0
    """Seconds since the last step for which a checkpoint held the training up."""

    def report(self, event: Event) -> None:
        """Report an event of the run. Only rank 0's reach the ledger."""
        if self.telemetry:
            self.telemetry.event(event)
