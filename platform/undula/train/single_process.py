"""A job trained in this process by itself: a world of one, without a worker group."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from undula.recovery.handover import LeaveGroup, Request, process
from undula.telemetry.messages import Publisher
from undula.train.job import Job
from undula.train.run import Run


@dataclass(frozen=True)
class SingleProcess:
    """A training in this process. One at a time, as torch's process group and a worker's state are the process's."""

    train: Callable[[Run], None]
    job: Job
    publish: Publisher

    def __call__(self) -> None:
        """Train from the newest checkpoint on, to the end of the plan or until `leave`.

        Raises:
            Exception: whatever the script raises.
        """
        process.join_group()
        process.is_run = True
        process.kept = None
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        with _world_of_one(device):
            run = Run(self.job, 0, 1, device, self.publish)
            try:
                self.train(run)
            except LeaveGroup:
                pass
            finally:
                run.forget()
                process.kept = None

    @staticmethod
    def leave() -> None:
        """End the training at its next step boundary; callable from another thread."""
        process.request = Request(leaves=True)


@contextmanager
def _world_of_one(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
