"""The actor of a Ray Train worker, extended to outlive its worker group."""

import gc
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ray.air._internal.device_manager import get_torch_device_manager_by_context
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, RayTrainWorker
from ray.train.v2._internal.util import ObjectRefWrapper

from undula.elastic.sockets import cut_connections, cut_sockets, listening_ports
from undula.recovery.handover import Request, process
from undula.recovery.progress import ProgressView
from undula.recovery.snapshot import Age, packed

PROMPT_END_S = 0.3
"""Seconds in which a train function normally ends after it has left the group, or after a collective has failed."""
LATE_IMPORTS = (
    *("ray.tune", "undula.elastic.ray.backend"),
    *(
        "undula.train.run",
        "undula.telemetry.tensorboard",
        "undula.state.safetensors_io",
        "torch.distributed.checkpoint.state_dict_saver",
    ),
)
"""Modules that Ray Train, a group's first rendezvous and a run's first checkpoint would otherwise import while ranks wait."""
PIECE_BYTES = 8 * 2**20
"""Size of the pieces in which memory is faulted in."""
FAULT_IN_BYTES = 2**30
"""Maximum memory to fault in, which is also what the heap keeps when it is freed."""


@dataclass
class ElasticStatus(WorkerStatus):
    """Answer of a worker to a poll."""

    progress: ProgressView | None = None
    """Progress of the rank; None if the train function does not use a Run."""
    has_left: bool = False
    """Whether the rank has left the group at a step boundary."""
    resident_bytes: int = 0
    """Resident memory of the process."""


class ElasticWorker(RayTrainWorker):
    """A RayTrainWorker that can leave its group and join another one."""

    def prepare(
        self, train_fn_ref: ObjectRefWrapper[Any], prepare: Callable[[], None] | None, resident_bytes: int, home: str
    ) -> ActorMetadata:
        """Do what takes time before the first group, while other workers still train: imports, device context, first kernels, memory.

        Args:
            train_fn_ref: the train function.
            prepare: the trainer's own preparation.
            resident_bytes: resident memory of a worker that trains; 0 if it is unknown or lies on the device.
            home: id of the controller's node.
        """
        process.home = home
        train_fn_ref.get()
        warm_up()
        if prepare:
            prepare()
        fault_in(resident_bytes - resident_memory())
        gc.freeze()  # these objects stay, so collections at the start of a group can skip them
        return self.get_metadata()

    def init_train_context(self, *arguments: Any, **more: Any) -> None:
        process.join_group()
        process.own_ports = listening_ports()  # among them Ray's, whose connections must stay
        super().init_train_context(*arguments, **more)
        gc.collect()  # frees what the former group's script has left in reference cycles, such as its model
        process.controller = get_train_context().controller_actor

    def poll_status(self) -> ElasticStatus:
        status = ElasticStatus(**vars(super().poll_status()))
        if not process.is_run:
            return status
        status.progress = process.progress.view()
        status.resident_bytes = resident_memory()
        status.has_left = status.progress.phase == "left" and not status.running and status.error is None
        if status.has_left:
            status.running = True  # otherwise the controller would consider the run finished
        status.preemption_info = None  # the policy handles notices; Ray would train on until the deadline
        return status

    def set_request(self, request: Request) -> None:
        """Set what the rank must do at its next step boundary."""
        process.request = request

    def break_collectives(self) -> None:
        """Abort the rank's collectives, so that threads that wait in them raise."""
        abort_collectives()

    def ping(self) -> None:
        """Do nothing; an answer shows that the process is alive."""

    def export_state(self, room: float, newest: Age) -> tuple[bytes, np.ndarray[Any, Any]] | str | None:
        """The state that the last group has left in this process, for the controller to keep because this node will be removed.

        Args:
            room: bytes that the controller has room for.
            newest: age of the newest complete state that the controller holds.

        Returns:
            A snapshot's meta and bytes; None if the controller's state is as new; the reason if the state is too large to send.
        """
        kept = process.kept
        if kept is None or kept.age <= newest:
            return None
        if kept.state.bytes > room:
            return f"its {kept.state.bytes / 2**20:.0f} MiB are more than half of the memory that is free on the head"
        meta, data = packed(kept.plan_digest, kept.age, kept.state, kept.rows)
        return meta, np.frombuffer(data, np.uint8)

    def leave_group(self, timeout_s: float) -> bool:
        """End what the group has left running in this process. True if the process can join another group."""
        self.shutdown()  # type: ignore[no-untyped-call]
        thread = get_train_context().execution_context.training_thread_runner._thread
        if thread is not None:
            process.has_ended = True  # the function may be computing, where no aborted collective stops it
            thread.join(PROMPT_END_S)
            abort_collectives()  # another rank may be waiting for this one
            thread.join(timeout_s)
        error = get_train_context().execution_context.training_thread_runner.get_error()
        has_left = thread is None or not thread.is_alive()
        return has_left and (error is None or process.is_sound) and not process.is_spent

    def kill_process(self, pid: int) -> None:
        """Send SIGKILL to another worker of this machine; a stopped process does not react to Ray."""
        with suppress(OSError):
            if type(self).__name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def abort_collectives() -> None:
    """Make rendezvous and collectives of this process's groups fail, here and on the ranks that wait for this one.

    Gloo comes first: a thread that an aborted NCCL collective releases must not be able to commit the result over gloo.
    """
    cut_connections(listening_ports() - process.own_ports)
    cut_sockets(process.collective_sockets)
    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()  # has no effect on gloo


def resident_memory() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fault_in(num_bytes: int) -> None:
    """Extend this process's heap by as much as the heap keeps after it is freed (KEEP_HEAP in undula.elastic.ray.pool)."""
    pieces = range(min(num_bytes, FAULT_IN_BYTES) // PIECE_BYTES)
    held = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in pieces]
    del held


def warm_up() -> None:
    """Run one step of a tiny model, in which torch imports modules and CUDA creates its context."""
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
