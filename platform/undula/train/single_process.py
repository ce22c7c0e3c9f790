"""A job trained in this process by itself: a world of one, without a worker group."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from undula.parallel.layout import join_layout
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.telemetry.messages import Publisher
from undula.train.job import Job
from undula.train.run import Run


class SingleProcess:
    """A training in this process. One at a time, because torch's process group belongs to the process.

    Args:
        train: the script's train function.
        job: what to train.
        publish: takes messages for the driver.
    """

    def __init__(self, train: Callable[[Run], None], job: Job, publish: Publisher):
        self._train = train
        self._job = job
        self._publish = publish
        self._worker = WorkerState(is_run=True)

    def __call__(self) -> None:
        """Train from the newest checkpoint on, to the end of the plan or until `leave`.

        Raises:
            Exception: whatever the script raises.
        """
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        with world_of_one(device):
            run = Run(self._job, join_layout(0, 1, device), self._worker, self._publish)
            try:
                self._train(run)
            except LeaveGroup:
                pass
            finally:
                run.free()

    def leave(self) -> None:
        """End the training at its next step boundary; callable from another thread."""
        self._worker.request = Request(leaves=True)


@contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    """A process group with this process alone."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
