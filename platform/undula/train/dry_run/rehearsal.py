"""Rehearsal of a job's steps in a worker that has not joined a group yet, so that torch compiles the model while other workers train.

The script's train function runs up to its steps, on this process alone and on arbitrary samples. It gets a step with one micro-batch of
each size that the plan has, and nothing is committed. torch keeps what it has compiled in this process, and in the cache of the node.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import torch

from undula.data.reader import SampleReader, Samples
from undula.data.script.indexed import ScriptData
from undula.data.script.items import Items
from undula.parallel.layout import join_layout
from undula.plan.plan import MicroBatch, Plan
from undula.recovery.baseline import IN_WORK
from undula.recovery.worker_state import LeaveGroup, WorkerState
from undula.state.events import RehearsalEvent
from undula.telemetry.messages import Publisher
from undula.train.job import Job
from undula.train.loop import TrainingLoop
from undula.train.micro_batches import MicroBatches
from undula.train.parts import ScriptParts
from undula.train.run import Run
from undula.train.samples import ScriptSamples
from undula.train.script_state import AfterStep
from undula.train.session import GroupSession
from undula.train.setup import RunSetup
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
        run: Run | None = None
        try:
            run = Run(RehearsalSession(job, device, worker))
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


class LocalSession(GroupSession):
    """Session of a process that works beside the run: it claims no attempt, and nothing that it does is stored.

    Args:
        job: Settings of the job.
        device: Device of this process.
        worker: State of this process.
    """

    def __init__(self, job: Job, device: torch.device, worker: WorkerState):
        # The reduction of gradients is not compiled, and Horovod needs other ranks.
        job = replace(job, engine="torch")
        super().__init__(RunSetup.of_no_attempt(job, join_layout(0, 1, device), worker))


class RehearsalSession(LocalSession):
    """Session of a rehearsal. Its rank is that of a worker that joins another one, so that a script does not do what rank 0 should do."""

    def __init__(self, job: Job, device: torch.device, worker: WorkerState):
        super().__init__(job, device, worker)
        self.rank, self.world_size = 1, 2

    def samples_of(self, data: ScriptData, training: Items, validation: Items | None) -> ScriptSamples:
        """Return the samples without loader processes, because a few micro-batches are enough."""
        return super().samples_of(replace(data, num_workers=0), training, validation)

    def gather(self, value: object) -> list[Any]:
        """Return the value for each rank of the group that this process pretends to be in."""
        return [value] * self.world_size

    def loop(
        self, parts: ScriptParts, validate: ValidationFunction | None, after_step: AfterStep | None
    ) -> TrainingLoop:
        return RehearsalLoop(self.setup, parts, validate, after_step)


class RehearsalLoop(TrainingLoop):
    """Loop that rehearses a step, and a validation after it."""

    def begin(self) -> int:
        """Begin at the beginning of the run."""
        self.attempt.committed = 0
        return 0

    def steps(self) -> Iterator[Step]:
        """Yield a step, rehearse a validation, and leave the train function as a run leaves it when its group ends."""
        setup, reader = self._setup, _AnyRows(self._parts.samples.training(0))
        self._closing.callback(reader.close)
        self.begin()

        def work_of(index: int) -> list[MicroBatch]:
            return _each_size(setup.plan) if index == 0 else []

        self._batches = MicroBatches(work_of, reader, setup.layout.device, setup.worker.enter)
        self.boundary.settle(None, IN_WORK)
        yield self._step(0)
        if self._validation is not None:
            self._validation.rehearse()
        raise LeaveGroup


class _AnyRows:
    """Reader that returns arbitrary samples instead of the next ones."""

    def __init__(self, reader: SampleReader):
        self.any_rows, self.close = reader.any_rows, reader.close

    def open(self) -> None:
        """Do nothing, because a few samples are read without reading ahead."""

    def take(self, virtual_worker: int, count: int) -> Samples:
        return self.any_rows(count)


def _each_size(plan: Plan) -> list[MicroBatch]:
    """Return a micro-batch of each size that a plan has."""
    return [MicroBatch(0, 0, number, size) for number, size in enumerate(sorted(plan.sizes(), reverse=True))]
