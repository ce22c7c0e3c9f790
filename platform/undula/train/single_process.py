"""Training of a rank in this process, without a worker group of Ray."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

from undula.parallel.layout import join_layout
from undula.recovery.progress import LONGEST_PHASE_S
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.telemetry.messages import Publisher
from undula.train.job import Job
from undula.train.run import Run, call_train
from undula.train.script_file import make_ready
from undula.train.session import GroupSession
from undula.train.setup import RunSetup
from undula.train.shard_errors import note_shards


class SingleProcess:
    """Trains a run in this process, either alone or with ranks in other processes of this machine.

    A process can train only one run at a time, because torch's default process group belongs to the process.

    Args:
        train: Train function of the script.
        job: Settings of the job.
        publish: Function that sends messages to the driver.
        rank: Rank of this process.
        world_size: Number of ranks.
        rendezvous: Path of a file through which the ranks find each other. The file must not exist before.
        device: Device on which this rank trains. By default, each rank has a GPU of its own if this process sees enough of them, and
            otherwise all ranks train on the CPU.
        hands_over: Whether this process keeps the state if the training is interrupted, for the next call.
    """

    def __init__(
        self,
        train: Callable[[Run], None],
        job: Job,
        publish: Publisher,
        rank: int = 0,
        world_size: int = 1,
        rendezvous: str | None = None,
        device: torch.device | None = None,
        hands_over: bool = False,
    ):
        self._train = train
        self._job = job
        self._publish = publish
        self._rank = rank
        self._world_size = world_size
        self._rendezvous = rendezvous
        self.device = device or local_device(rank, world_size)
        self._hands_over = hands_over
        self._worker = WorkerState(is_run=True)

    def __call__(self) -> None:
        """Train from the newest state of the run, until the plan ends or `leave` is called.

        Raises:
            Exception: Any exception that the script raises.
        """
        make_ready(self._train)
        with local_world(self.device, self._rank, self._world_size, self._rendezvous):
            layout = join_layout(self._rank, self._world_size, self.device, local_rank=self._rank)
            session = GroupSession(RunSetup.of(self._job, layout, self._worker, self._publish))
            run = Run(session)
            try:
                call_train(self._train, run, session)
            except BaseException as error:
                note_shards(error)
                if self._hands_over:
                    run.hand_over()
                if not isinstance(error, LeaveGroup):
                    raise
            finally:
                run.free()
                self._worker.close_kept()
                self._worker.request = Request()

    def leave(self, saves: bool = False) -> None:
        """End the training at its next step boundary, and save a checkpoint there if `saves`. Other threads can call this."""
        self._worker.request = Request(leaves=True, saves=saves)


def local_device(rank: int, world_size: int) -> torch.device:
    """Return a GPU for a rank, or the CPU if this process does not see a GPU for each of the ranks on this machine."""
    has_gpus = torch.cuda.device_count() >= world_size
    return torch.device("cuda", rank) if has_gpus else torch.device("cpu")


@contextmanager
def local_world(
    device: torch.device, rank: int = 0, world_size: int = 1, rendezvous: str | None = None
) -> Iterator[None]:
    """Make a default process group of this process alone, or of all processes that have the same rendezvous file.

    NCCL needs a GPU for each rank, so ranks that have fewer use gloo.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" and torch.cuda.device_count() >= world_size else "gloo"
    store = FileStore(rendezvous, world_size) if rendezvous else HashStore()
    # No controller watches these ranks, so that a collective must end if a rank hangs.
    limit = timedelta(seconds=LONGEST_PHASE_S)
    hook = sys.excepthook
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    sys.excepthook = hook  # torch's would print "[rank0]: " before each line of a traceback, also after this block
    try:
        yield
    finally:
        if dist.is_initialized():  # a script of torchrun destroys it at its end
            dist.destroy_process_group()
