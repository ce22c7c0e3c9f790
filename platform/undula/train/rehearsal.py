"""Rehearsal of a job's steps in a worker that has not joined a group yet, so that torch compiles the model while other workers train.

The script's train function runs up to its steps, on this process alone and on arbitrary samples. It gets a step with one micro-batch of
each size that the plan has, and nothing is committed. torch keeps what it has compiled in this process, and in the cache of the node.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from undula.data.nested import with_tensors
from undula.data.reader import SampleReader
from undula.data.script.dataset import IndexedDataset
from undula.data.script.items import Collate
from undula.data.stored.mixture import load_data
from undula.parallel.engines.engine import Engine
from undula.parallel.layout import join_layout
from undula.plan.plan import MicroBatch, Plan
from undula.recovery.worker_state import LeaveGroup, WorkerState
from undula.state.attempts import Lineage
from undula.state.events import RehearsalEvent
from undula.state.pieces import RankState
from undula.storage import open_store
from undula.telemetry.messages import Publisher
from undula.train.context import RunSetup
from undula.train.job import Job
from undula.train.open_gradients import OpenGradients
from undula.train.run import Run
from undula.train.script_state import AfterStep
from undula.train.single_process import local_world
from undula.train.step import Step
from undula.train.validation import ValidationFunction


def rehearse(train: Callable[[Run], None], job: Job, device: torch.device, publish: Publisher) -> None:
    """Run a train function up to the end of a step that is not committed. What it prints is not shown.

    A script that fails does so in the run as well, or it needs what a rehearsal does not have, such as other ranks. Then the group waits
    while this worker compiles. The worker joins in any case, and the user is told.
    """
    worker = WorkerState()
    with local_world(device), redirect_stdout(io.StringIO()):
        run: RehearsedRun | None = None
        try:
            run = RehearsedRun(job, device, worker)
            train(run)
        except LeaveGroup:
            pass
        except (Exception, SystemExit) as error:
            publish(RehearsalEvent(f"{type(error).__name__}: {' '.join(str(error).split())}"))
        finally:
            if run is not None:
                run.free()
            worker.close_kept()
            torch.set_default_device(None)  # the script may have set one for this thread


class RehearsedRun(Run):
    """Run that rehearses a step, on this process alone. It claims no attempt, and stores and restores nothing.

    Its rank is that of a worker that joins another one, so that a script does not write what rank 0 should write.

    Args:
        job: Settings of the job.
        device: Device of this process.
        worker: State of the rehearsal.
    """

    def __init__(self, job: Job, device: torch.device, worker: WorkerState):
        # The reduction of gradients is not compiled, and Horovod needs other ranks.
        job = replace(job, engine="torch")
        data = job.script_data.training if job.script_data else load_data(job.data)
        layout, plan, store = join_layout(0, 1, device), Plan(job.plan, data.num_rows), open_store(job.run_url)
        self._set_up(RunSetup(job, layout, worker, lambda _: None, None, store, data, plan, "", 0, Lineage()))
        self.rank, self.world_size = 1, 2

    def dataset(
        self,
        dataset: IndexedDataset,
        *,
        validation: IndexedDataset | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        name: str | None = None,
        **loader_arguments: object,
    ) -> None:
        """Take the samples of a few micro-batches from a dataset, without loader processes."""
        super().dataset(
            dataset, validation=validation, collate_fn=collate_fn, num_workers=0, name=name, **loader_arguments
        )

    def validated(self, means: Mapping[str, float], samples: int) -> None:
        """Do nothing, because nothing is recorded."""

    def log(self, values: Mapping[str, float]) -> None:
        """Do nothing, because nothing is recorded."""

    def save(self) -> None:
        """Do nothing, because nothing is stored."""

    def stop(self, reason: str) -> None:
        """Do nothing, because the rehearsal ends after its step."""

    def copies(self) -> dict[str, RankState]:
        """Return nothing, because nothing is stored."""
        return {}

    def gather(self, value: object) -> list[Any]:
        """Return the value for each rank of the group that this process pretends to be in."""
        return [value] * self.world_size

    def restore(self) -> int:
        """Return the number of committed steps at the beginning of a run."""
        self._check_parts(None)
        self._is_restored = True
        return 0

    def steps(self, validate: ValidationFunction | None = None, after_step: AfterStep | None = None) -> Iterator[Step]:
        """Yield a step, rehearse a validation, and leave the train function as a run leaves it when its group ends."""
        if not self._is_restored:
            self._check_parts(validate)
        assert self._engine is not None
        assert self._model is not None
        samples, job = self._samples(), self._setup.job
        batches = self._batches(samples.training(0), self.plan)
        gradients = OpenGradients(self._engine, self._engine.optimizer)
        yield RehearsedStep(self._engine, gradients, self.plan, batches, self.base_lr, job.gradient.max_norm)
        if validate is not None and samples.has_validation:
            self._model.eval()
            with torch.no_grad():
                for _, batch in self._batches(samples.validation(), samples.validation_plan):
                    validate(batch)
        raise LeaveGroup

    def _batches(self, stream: SampleReader, plan: Plan) -> list[tuple[int, Any]]:
        """Return a batch of each size of a plan, with the size. A micro-batch without samples has two rows."""
        found = [(size, stream.any_rows(size or 2).batch) for size in sorted(plan.sizes(), reverse=True)]
        stream.close()
        return [(size, with_tensors(batch, lambda tensor: tensor.to(self.device))) for size, batch in found]


class RehearsedStep(Step):
    """Step of which only this process has a part, and which is not committed.

    Args:
        engine: Engine of the model.
        gradients: Gradients of the model.
        plan: Plan of the run.
        batches: Micro-batches and their numbers of samples.
        lr: Learning rate.
        max_norm: Maximum norm of the gradient.
    """

    def __init__(
        self,
        engine: Engine,
        gradients: OpenGradients,
        plan: Plan,
        batches: list[tuple[int, Any]],
        lr: float,
        max_norm: float | None,
    ):
        self.index, self.merged_steps, self.samples, self.lr = 0, 1, plan.step(0).samples, lr
        self.updated = self.is_last = False
        self.micro_batch: MicroBatch | None = None
        self._engine, self._gradients = engine, gradients
        self._batches = batches
        self._max_norm = max_norm
        self._norm: Tensor | None = None
        self._sums = 0.0, 0
        """Sum of the losses of the samples, and number of the samples."""

    def batches(self) -> Iterator[Any]:
        self._gradients.free_former()
        self._engine.begin_step(len(self._batches))
        self._gradients.begin_step(self.index)
        for place, (size, batch) in enumerate(self._batches):
            if place:
                self._gradients.release(after_backward=True)
            self.is_last = place == len(self._batches) - 1
            self._engine.before_forward(self.is_last)
            self._gradients.hold(after_backward=False)
            self.micro_batch = MicroBatch(0, 0, place, size)
            yield batch
        self.micro_batch = None

    def load(self) -> list[Any]:
        return [batch for size, batch in self._batches if size]

    def total(self, value: float) -> float:
        return float(value)

    def backward(self, loss: Tensor, share: float | None = None) -> None:
        assert self.micro_batch is not None
        size = self.micro_batch.samples
        if size:
            self._sums = self._sums[0] + float(loss.detach()) * size, self._sums[1] + size
        self._gradients.release(after_backward=False)
        self._engine.backward(loss, 1.0, self.micro_batch, self.is_last)
        self._gradients.hold(after_backward=True)

    def keep_gradients(self) -> None:
        self._gradients.keep()

    def log(self, **values: float | Tensor) -> None:
        """Do nothing, because nothing is recorded."""

    def reduce(self, max_norm: float | None = None) -> Tensor:
        self._gradients.release(after_backward=True)
        limit = self._max_norm if max_norm is None else max_norm
        self._norm, _ = self._engine.finish_gradients(self.samples, limit)
        return self._norm

    def update(self) -> None:
        norm = self.reduce() if self._norm is None else self._norm
        self._engine.step()
        self.loss, self.grad_norm = self._sums[0] / max(self._sums[1], 1), float(norm)
        self.updated = self.applied = True
