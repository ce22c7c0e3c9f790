"""The actor in which a worker of Ray Train lives, made to outlast its worker group."""

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from ray.air._internal.device_manager import get_torch_device_manager_by_context
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, RayTrainWorker
from ray.train.v2._internal.util import ObjectRefWrapper

from undula.elastic.sockets import cut_connections, cut_sockets, listening_ports
from undula.recovery.progress import ProgressView
from undula.recovery.snapshot import Age, packed
from undula.recovery.worker_state import Request, WorkerState

AT_ONCE_S = 0.3
"""In which a train function ends by itself after it has left, or after a collective has failed."""
LATE_IMPORTS = (
    *("ray.tune", "undula.elastic.ray.backend"),
    *(
        "undula.train.run",
        "undula.telemetry.tensorboard",
        "undula.state.checkpoint_files",
    ),
)
"""What Ray Train, a group's first rendezvous and a run's first checkpoint would import in a worker."""
PIECE_BYTES = 8 * 2**20
FAULT_IN_BYTES = 2**30
"""At most; what a thread frees at the end of the heap stays there up to this size."""


@dataclass
class ElasticStatus(WorkerStatus):
    """A worker's answer to a poll."""

    progress: ProgressView | None = None
    """Where its rank stands; None where the train function is not a Run's."""
    has_left: bool = False
    """Whether it has left the group at a step boundary."""
    resident_bytes: int = 0
    """Memory of its process."""


_state: WorkerState | None = None


def worker_state() -> WorkerState:
    """The state of the worker that lives in this process: that of its ElasticWorker, or a new one under a controller of Ray's own."""
    global _state
    _state = _state or WorkerState()
    return _state


class ElasticWorker(RayTrainWorker):
    """A RayTrainWorker that can leave its group and join another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = worker_state()

    def prepare(
        self, train_fn_ref: ObjectRefWrapper[Any], prepare: Callable[[], None] | None, resident_bytes: int, home: str
    ) -> ActorMetadata:
        """Everything that takes time before a group starts, beside the group that still trains: imports, device, first kernels, memory.

        Args:
            train_fn_ref: what will run.
            prepare: the trainer's own preparation.
            resident_bytes: memory of a worker that trains; 0 where it is not known, or is none of the host's.
            home: the controller's node.
        """
        self._state.home = home
        train_fn_ref.get()
        warm_up()
        if prepare:
            prepare()
        fault_in(resident_bytes - resident())
        gc.freeze()  # what is here now stays: the collections at the beginning of groups need not look at it
        return self.get_metadata()

    def init_train_context(self, *arguments: Any, **more: Any) -> None:
        self._state.join_group()
        self._state.own_ports = (
            listening_ports()
        )  # Ray's among them, which must not be cut whatever becomes of the group
        super().init_train_context(*arguments, **more)
        gc.collect()  # of the former group's model what its script has left in cycles
        self._state.controller = get_train_context().controller_actor

    def poll_status(self) -> ElasticStatus:
        status = ElasticStatus(**vars(super().poll_status()))
        if not self._state.is_run:
            return status
        status.progress = self._state.progress.view()
        status.resident_bytes = resident()
        status.has_left = status.progress.phase == "left" and not status.running and status.error is None
        if status.has_left:
            status.running = True  # or the controller would take the run for finished
        status.preemption_info = None  # a Run's notices are the policy's; Ray would train on until the deadline
        return status

    def ask(self, request: Request) -> None:
        """For something at the next step boundary."""
        self._state.request = request

    def break_collectives(self) -> None:
        """Wake whoever waits there."""
        abort_collectives(self._state)

    def answer(self) -> None:
        """That this process is there."""

    def give_state(self, room: float, has: Age) -> tuple[bytes, np.ndarray[Any, Any]] | str | None:
        """What the last group has left here of the state, as a snapshot's meta and bytes, as this node will go.

        Args:
            room: bytes that the controller has for it.
            has: the age of the newest state that it has the whole of.

        Returns: None where it has nothing newer; in words why it does not give what it has.
        """
        held = self._state.held
        if held is None or held.age <= has:
            return None
        if held.state.bytes > room:
            return f"{held.state.bytes / 2**20:.0f} MiB of it are more than half of the memory that the head has free"
        meta, data = packed(held.plan_digest, held.age, held.state, held.rows)
        return meta, np.frombuffer(data, np.uint8)

    def leave(self, patience_s: float) -> bool:
        """End what the group has left running here; whether this process can join another group."""
        self.shutdown()  # type: ignore[no-untyped-call]
        thread = get_train_context().execution_context.training_thread_runner._thread
        if thread is not None:
            self._state.has_ended = True  # it may compute, where no broken collective tells it
            thread.join(AT_ONCE_S)
            abort_collectives(self._state)  # another rank may wait for this one
            thread.join(patience_s)
        error = get_train_context().execution_context.training_thread_runner.get_error()
        has_left = thread is None or not thread.is_alive()
        return has_left and (error is None or self._state.is_sound) and not self._state.is_spent

    def kill(self, pid: int) -> None:
        """Send SIGKILL to another worker of this machine, which is stopped and does not end when Ray asks it to.

        A process that has taken over the worker's id in the meantime is left alone.
        """
        with suppress(psutil.Error):
            other = psutil.Process(pid)
            if type(self).__name__ in " ".join(other.cmdline()):
                other.kill()


def abort_collectives(state: WorkerState) -> None:
    """Wake threads that wait in a rendezvous or a collective of this process's groups, here and on other ranks, for one that is gone."""
    # Gloo's first: a thread that an aborted NCCL collective lets go must not find a way to commit what came out of it.
    cut_connections(listening_ports() - state.own_ports)
    cut_sockets(state.collective_sockets)
    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()  # which does nothing for gloo


def resident() -> int:
    """Resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def fault_in(num_bytes: int) -> None:
    """Make memory part of this process's heap, up to what the heap keeps (KEEP_MEMORY of undula.elastic.ray.pool)."""
    pieces = range(min(num_bytes, FAULT_IN_BYTES) // PIECE_BYTES)
    held = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in pieces]
    del held


def warm_up() -> None:
    """One step of a tiny model: torch imports much of itself only then, and CUDA makes its context."""
    get_torch_device_manager_by_context()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(2, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(2, 2, device=device)).sum().backward()
    optimizer.step()
    for module in LATE_IMPORTS:
        import_module(module)
    from undula.state.model_state import load_state, model_and_optimizer_state

    load_state(model, optimizer, model_and_optimizer_state(model, optimizer))
    gc.collect()
