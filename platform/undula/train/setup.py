"""Parts of a run that a rank knows before the script has made its model: its settings, its data and plan, and the attempt."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from undula.data.planned import Data
from undula.data.stored.mixture import load_data
from undula.parallel.layout import Layout
from undula.plan.plan import MicroBatch, OptimizerStep, Plan
from undula.recovery.worker_state import WorkerState
from undula.state.attempts import Lineage, claim
from undula.state.directory import require_newest_submission
from undula.state.ledger import recorded_attempts
from undula.storage import Store, open_store
from undula.telemetry.messages import Publisher
from undula.train.job import Job

if TYPE_CHECKING:
    from undula.recovery.offers import Leavers
    from undula.recovery.replica import ReplicaClient  # which imports Ray


@dataclass(frozen=True)
class RunSetup:
    """Parts of a run that a rank knows before the script has made its model."""

    job: Job
    layout: Layout
    worker: WorkerState
    publish: Publisher
    replicas: "ReplicaClient | None"
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
    leavers: "Leavers | None" = None
    """Workers that are in no group any more; None with Ray Train's own controller."""

    @classmethod
    def of(
        cls,
        job: Job,
        layout: Layout,
        worker: WorkerState,
        publish: Publisher,
        replicas: "ReplicaClient | None" = None,
        leavers: "Leavers | None" = None,
    ) -> "RunSetup":
        """Find out the run's data and read its directory, and claim the number of an attempt. All ranks must call this.

        Raises:
            SupersededError: The run was submitted again.
        """
        store, data = open_store(job.run_url), _data_of(job)
        layout = replace(layout, interleaves=job.sharding.interleaves)
        plan = Plan(job.plan, data.num_rows)
        held = [0] * layout.world_size
        dist.all_gather_object(held, worker.held.age[0] if worker.held else 0, group=layout.control)
        claimed: list[tuple[int, Lineage] | None] = [None]
        if layout.is_first:
            require_newest_submission(store, job.submission)
            claimed = [claim(store, recorded_attempts(store), max(held))]
        dist.broadcast_object_list(claimed, group=layout.control, group_src=0)
        assert claimed[0] is not None
        digest = plan.digest(data.digest, job.precision)
        return cls(job, layout, worker, publish, replicas, store, data, plan, digest, *claimed[0], leavers)

    @classmethod
    def of_no_attempt(cls, job: Job, layout: Layout, worker: WorkerState) -> "RunSetup":
        """Return the setup of a process that works beside the run. It claims no attempt, and its messages go nowhere."""
        data, layout = _data_of(job), replace(layout, interleaves=job.sharding.interleaves)
        plan, store = Plan(job.plan, data.num_rows), open_store(job.run_url)
        return cls(job, layout, worker, lambda message: None, None, store, data, plan, "", 0, Lineage())

    @property
    def virtual_workers(self) -> range:
        """Virtual workers of this rank's cell."""
        return self.layout.virtual_workers(self.job.plan.virtual_workers)

    def step(self, index: int) -> OptimizerStep:
        """Return the step of the optimizer that begins with step `index` of the plan."""
        return self.plan.optimizer_step(index, self.layout.num_cells)

    def micro_batches(self, index: int, equal_rounds: bool) -> list[MicroBatch]:
        """Return the micro-batches that this rank runs in the step that begins with step `index`; none after the end of the plan.

        A rank without a share of a short step runs a micro-batch of weight zero. If all ranks must run the same number of micro-batches,
        a rank runs one of weight zero for each that it lacks. Such a micro-batch has two rows, because some layers, such as BatchNorm,
        cannot train on one row.
        """
        if index >= self.plan.total_steps:
            return []
        steps = range(index, self.step(index).done)
        if equal_rounds:
            shares = self.layout.assignment(self.plan.spec.virtual_workers)
            return self.plan.aligned_work(steps, shares, self.layout.cell)
        return self.plan.work(steps, self.virtual_workers) or [MicroBatch(index, self.virtual_workers[0], 0, 0)]


def _data_of(job: Job) -> Data:
    return job.script_data.training if job.script_data else load_data(job.data)
