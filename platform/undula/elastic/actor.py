"""The actor in which a worker of Ray Train lives, made to outlast its worker group."""

import gc
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, RayTrainWorker
from ray.train.v2._internal.util import ObjectRefWrapper

from undula.run.handover import ProgressView, process

AT_ONCE_S = 0.3
"""In which a train function ends by itself after it has left, or after a collective has failed."""


@dataclass
class ElasticStatus(WorkerStatus):
    """A worker's answer to a poll."""

    progress: ProgressView | None = None
    """Where its rank stands; None where the train function is not a Run's."""
    has_left: bool = False
    """Whether it has left the group at a step boundary."""


class ElasticWorker(RayTrainWorker):
    """A RayTrainWorker that can leave its group and join another."""

    def prepare(self, train_fn_ref: ObjectRefWrapper[Any]) -> ActorMetadata:
        """Everything that takes time before a group starts, beside the group that still trains: imports, device, first kernels."""
        train_fn_ref.get()
        warm_up()
        return self.get_metadata()

    def init_train_context(self, *arguments: Any, **more: Any) -> None:
        process.join_group()
        super().init_train_context(*arguments, **more)

    def poll_status(self) -> ElasticStatus:
        status = ElasticStatus(**vars(super().poll_status()))
        if not process.is_run:
            return status
        status.progress = process.progress.view()
        status.has_left = status.progress.phase == "left" and not status.running and status.error is None
        if status.has_left:
            status.running = True  # or the controller would take the run for finished
        status.preemption_info = None  # a Run's notices are the policy's; Ray would train on until the deadline
        return status

    def ask_to_leave(self, save: bool) -> None:
        """At the next step boundary, after a durable checkpoint where `save`."""
        if save:
            process.save.set()
        process.leave.set()

    def answer(self) -> None:
        """That this process is there."""

    def leave(self, patience_s: float) -> bool:
        """End what the group has left running here; whether this process can join another group."""
        self.shutdown()  # type: ignore[no-untyped-call]
        thread = get_train_context().execution_context.training_thread_runner._thread
        if thread is not None:
            thread.join(AT_ONCE_S)
            if thread.is_alive():
                abort_collectives()
                thread.join(patience_s)
        error = get_train_context().execution_context.training_thread_runner.get_error()
        return (thread is None or not thread.is_alive()) and (error is None or process.collective_failed)

    def kill(self, pid: int) -> None:
        """SIGKILL another worker of this machine, which is stopped and does not end at Ray's word."""
        with suppress(OSError):
            if type(self).__name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def abort_collectives() -> None:
    """Wake a thread that waits in a collective of any of this process's groups for a rank that is gone."""
    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()


def warm_up() -> None:
    """One step of a tiny model: torch imports much of itself only then, and CUDA makes its context."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(2, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(2, 2, device=device)).sum().backward()
    optimizer.step()
    from undula.run.modelstate import load_state, model_and_optimizer_state

    load_state(model, optimizer, model_and_optimizer_state(model, optimizer))
    gc.collect()
