"""What Ray Train runs on every worker: it makes the Run, hands it to the user's function, and shows what that prints."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil
import ray
import ray.train
import ray.train.torch

from undula.data.mixture import load_data
from undula.data.streams import rank_stream
from undula.errors import StorageError, UndulaError
from undula.plan.plan import Plan
from undula.recovery.handover import LeaveGroup, process
from undula.recovery.replica import Mirror
from undula.telemetry.hub import TeeToDriver
from undula.telemetry.messages import Publisher
from undula.train.job import Job
from undula.train.run import Run
from undula.train.tracebacks import is_of_collective, keep_traceback


@dataclass(frozen=True)
class Worker:
    """The train loop of a job, for Ray Train's `train_loop_per_worker`."""

    train: Callable[[Run], None]
    job: Job
    publish: Publisher

    def __call__(self) -> None:
        context = ray.train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
        process.is_run = True
        _leave_batch_scheduling()
        with TeeToDriver(sys.stdout, self.publish, rank):
            device, local_rank = ray.train.torch.get_device(), context.get_local_rank()
            run: Run | None = None
            try:
                run = Run(self.job, rank, world_size, device, self.publish, local_rank, _mirror())
                self.train(run)
            except LeaveGroup:
                assert run is not None
                run.hand_over()
                process.progress.enter("left")
            except Exception as error:
                process.is_sound = is_of_collective(error) or isinstance(error, StorageError)
                keep_traceback(error)
                if run is not None:
                    with suppress(Exception):  # a GPU in error gives nothing back
                        run.hand_over()
                traceback.clear_frames(error.__traceback__)  # the script's variables have the model too
                raise
            finally:
                if run is not None:
                    run.forget()


def open_data(job: Job) -> None:
    """Read a window of a job's data, so that connections are there and memory is by the time that the first batch is asked for."""
    with suppress(UndulaError, OSError):  # the run itself will tell
        data = load_data(job.data)
        rank_stream(data, Plan(job.plan, data.num_rows), range(1), job.data).any_rows(1)


def _mirror() -> Mirror | None:
    """To the controller, where it keeps copies of snapshots."""
    if process.controller is None:
        return None
    context = ray.train.get_context()
    is_elsewhere = ray.get_runtime_context().get_node_id() != process.home
    is_alone = context.get_local_world_size() == context.get_world_size()
    return Mirror(process.controller, context.get_world_rank(), is_elsewhere, is_alone)


def _leave_batch_scheduling() -> None:
    """Take precedence over Ray's daemons where these run as batch processes, as undula.cluster.local starts them."""
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_BATCH:
        for thread in psutil.Process().threads():  # including those of the collectives
            os.sched_setscheduler(thread.id, os.SCHED_OTHER, os.sched_param(0))
