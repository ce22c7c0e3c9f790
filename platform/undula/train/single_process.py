"""A rank that trains in this process, without a worker group of Ray."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

from undula.parallel.layout import join_layout
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.telemetry.messages import Publisher
from undula.train.job import Job
from undula.train.run import Run


class SingleProcess:
    """A training in this process: by itself, or with ranks in other processes of this machine.

    One at a time, because torch's process group belongs to the process.

    Args:
        train: The script's train function.
        job: What to train.
        publish: Takes messages for the driver.
        rank, world_size: Place of this process.
        rendezvous: File by which the ranks find each other. It must not exist before.
    """

    def __init__(
        self,
        train: Callable[[Run], None],
        job: Job,
        publish: Publisher,
        rank: int = 0,
        world_size: int = 1,
        rendezvous: str | None = None,
    ):
        self._train = train
        self._job = job
        self._publish = publish
        self._rank = rank
        self._world_size = world_size
        self._rendezvous = rendezvous
        self._worker = WorkerState(is_run=True)

    def __call__(self) -> None:
        """Train from the newest state on, to the end of the plan or until `leave`.

        Raises:
            Exception: whatever the script raises.
        """
        has_gpus = torch.cuda.device_count() >= self._world_size
        device = torch.device("cuda", self._rank) if has_gpus else torch.device("cpu")
        with local_world(device, self._rank, self._world_size, self._rendezvous):
            layout = join_layout(self._rank, self._world_size, device, local_rank=self._rank)
            run = Run(self._job, layout, self._worker, self._publish)
            try:
                self._train(run)
            except LeaveGroup:
                pass
            finally:
                run.free()

    def leave(self, saves: bool = False) -> None:
        """End the training at its next step boundary, with a checkpoint there if `saves`; callable from another thread."""
        self._worker.request = Request(leaves=True, saves=saves)


@contextmanager
def local_world(
    device: torch.device, rank: int = 0, world_size: int = 1, rendezvous: str | None = None
) -> Iterator[None]:
    """A process group with this process alone, or with those that have the same rendezvous file."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = FileStore(rendezvous, world_size) if rendezvous else HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
