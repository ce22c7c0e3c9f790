"""Actor of a Ray Train worker, extended to outlive its worker group."""

import gc
import inspect
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeAlias

import numpy as np
import psutil
import ray
import torch
import torch.distributed as dist
from ray import cloudpickle
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, RayTrainWorker
from ray.train.v2._internal.util import ObjectRefWrapper
from ray.train.v2.api.preemption import PreemptionInfo

from undula.data.script.pickling import dumps
from undula.elastic.network import node_address, use_interface
from undula.elastic.pure.deadlock import ENDED, CollectiveWait
from undula.elastic.ray.gpus import refuse_unseen_gpus, reserved_device
from undula.elastic.sockets import cut_connections, cut_sockets, listening_ports
from undula.elastic.waits import present_wait
from undula.errors import ClusterError
from undula.masking.output import mask_output
from undula.recovery.offers import Common, Described, Offer, described
from undula.recovery.part_server import PartAddress, PartServer
from undula.recovery.progress import LEFT, ProgressView
from undula.recovery.snapshot import Age, packed
from undula.recovery.worker_state import Request, WorkerState
from undula.state.pieces import RankState
from undula.state.processes import ProcessIdentity, find_process, own_identity, send_signal
from undula.train.tracebacks import kept_traceback

PROMPT_END_S = 0.3
"""Seconds within which a train function normally ends after it has left the group or a collective has failed."""
LATE_IMPORTS = ("ray.tune", "undula.elastic.ray.controller", "undula.train.run", "undula.state.checkpoint_files")
"""Modules that Ray Train, a group's first rendezvous and a run's first checkpoint would otherwise import while other ranks wait."""
KEPT_FUNCTION_BYTES = 64 * 2**20
"""Maximum size of a train function that each worker keeps, in bytes."""
PIECE_BYTES = 8 * 2**20
"""Size in bytes of the pieces in which memory is faulted in."""
FAULT_IN_BYTES = 2**30
"""Maximum number of bytes to fault in, which is also the number of freed bytes that the heap keeps."""


@dataclass(frozen=True)
class WorkerMetadata(ActorMetadata):
    """Address of a worker and identity of its process."""

    process: ProcessIdentity


@dataclass
class ElasticStatus(WorkerStatus):
    """Answer of a worker to a poll."""

    progress: ProgressView | None = None
    """Progress of the rank; None if the train function does not use a Run."""
    has_left: bool = False
    """Whether the rank has left the group at a step boundary."""
    resident_bytes: int = 0
    """Resident memory of the process in bytes."""
    shares_state: bool = False
    """Whether the ranks hold different parts of the state."""
    wait: CollectiveWait | None = None
    """Collective in which the rank has waited for some seconds."""


WATCHED_S = 3.0
"""Seconds without progress from which on a worker looks for the collective in which it waits."""
Departure: TypeAlias = Literal["left", "busy", "unusable"]
"""Result of leaving a group: the process can join another group, its train function still makes progress, or it cannot be used again."""
_state: WorkerState | None = None


def worker_state() -> WorkerState:
    """Return the state of this process's worker, which ElasticWorker and the train function share. The first call creates it."""
    global _state
    _state = _state or WorkerState()
    return _state


@dataclass(frozen=True)
class KeptFunction:
    """Train function in the memory of this process, from which each group gets a new copy."""

    pickled: bytes
    rehearsed: Callable[[], Any] | None = None
    """The train function itself if this process has rehearsed it. A copy of a script's own classes would be compiled again."""

    def get(self) -> Any:
        return self.rehearsed or cloudpickle.loads(self.pickled)


class ElasticWorker(RayTrainWorker):
    """RayTrainWorker that can leave its group and join another one."""

    _train_fn: KeptFunction | None = None
    _execute_script: Callable[[], None] | None = None
    """Function that executes the script for the next group; None if the train function does not come from a file."""
    _parts: PartServer | None = None
    """Server of the state that this process holds while it is in no group; None until a rank of the next group asks for parts."""

    def __init__(self) -> None:
        mask_output()  # before this process loads the train function, whose modules and script may print
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = worker_state()
        if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
            torch.set_num_threads(
                int(threads)
            )  # torch itself has read this before Ray has set it if this process is a fork

    def prepare(
        self, train_fn_ref: ObjectRefWrapper[Any], prepare: Callable[[], None] | None, resident_bytes: int, home: str
    ) -> WorkerMetadata:
        """Prepare this process for its first group while other workers train: imports, device context, first kernels and memory.

        Args:
            train_fn_ref: Reference to the train function.
            prepare: Function with the trainer's own preparation. It is called before this process computes anything.
            resident_bytes: Resident memory of a worker that trains, in bytes; 0 if it is unknown or if the state is on the device.
            home: Id of the controller's node.

        Returns:
            Address of this worker and identity of its process.

        Raises:
            ClusterError: No worker can train on this node, for example because torch does not see the GPUs that Ray has reserved.
        """
        self._state.home = home
        try:
            refuse_unseen_gpus()
            if prepare:  # before the script is imported, because it decides how torch computes
                prepare()
            use_interface(None, node_address())
            train_fn = train_fn_ref.get()
            self._execute_script = getattr(inspect.unwrap(train_fn), "execute_script", None)
            if self._execute_script:
                self._execute_script()
            self._keep(train_fn, rehearse_steps(train_fn))
        except ClusterError as error:
            raise ClusterError(f"no worker can train on node {name_of_node()}: {error}") from None
        warm_up(reserved_device())
        fault_in(resident_bytes - resident_memory())
        gc.freeze()  # these objects stay alive, so collections at the start of a group can skip them
        return WorkerMetadata(**vars(self.get_metadata()), process=own_identity())

    def _keep(self, train_fn: Callable[[], Any], is_rehearsed: bool = False) -> None:
        """Keep the train function for later groups.

        Ray drops it from the memory of this node when the samples need the space. To fetch it again, Ray may first try a node that has
        just been lost, and tries another one only after 10 s (object_manager_pull_timeout_ms). A function with large arrays stays in that
        memory, which the workers of a node share.
        """
        try:
            pickled = dumps(train_fn)
        except Exception as error:  # whatever the script's objects raise
            logging.getLogger("undula").info("each group fetches the train function; it cannot be pickled: %s", error)
            return
        if len(pickled) <= KEPT_FUNCTION_BYTES:
            self._train_fn = KeptFunction(pickled, train_fn if is_rehearsed else None)

    def run_train_fn(self, train_fn_ref: Any) -> None:
        kept: Any = self._train_fn
        super().run_train_fn(kept or train_fn_ref)

    def init_train_context(self, *arguments: Any, **more: Any) -> None:
        self._state.join_group()
        if self._parts:
            self._parts.close()
            self._parts = None
        self._state.own_ports = listening_ports()  # these include Ray's ports, whose connections must stay
        super().init_train_context(*arguments, **more)
        gc.collect()  # frees objects of the former group in reference cycles, such as its model
        self._state.controller = get_train_context().controller_actor

    def poll_status(self) -> ElasticStatus:
        status = ElasticStatus(**vars(super().poll_status()))
        if not self._state.is_run:
            return status
        status.progress = self._state.progress.view()
        status.resident_bytes, status.shares_state = resident_memory(), self._state.shares_state
        if status.progress.phase.may_wait and status.progress.phase_s > WATCHED_S:
            thread = get_train_context().execution_context.training_thread_runner._thread
            status.wait = present_wait(thread.ident if thread else None)
        status.has_left = status.progress.phase == LEFT and not status.running and status.error is None
        if status.has_left:
            status.running = True  # otherwise the controller would consider the run finished
        elif not status.running and status.error is None:
            status.wait = CollectiveWait(ENDED, "", "")
        if status.error is None and (failure := self._state.failure):  # to shut down collectives can take seconds
            status.error = UserExceptionWithTraceback(failure, kept_traceback(failure) or "")
        status.preemption_info = None  # the policy handles notices; Ray would train until the deadline
        return status

    def mark_preempt(self, info: PreemptionInfo) -> None:
        """Store a notice for train functions that read it, without Ray's line in the log, because an event tells of the notice."""
        get_train_context().preemption_context.preemption_info = info

    def set_request(self, request: Request) -> None:
        """Set the request that the rank carries out at its next step boundary."""
        self._state.request = request

    def break_collectives(self, deadlock: str | None = None) -> None:
        """Abort the rank's collectives, so that threads that wait in them raise an exception.

        Args:
            deadlock: Message of the exception if the script is at fault; None if the ranks are to form another group.
        """
        self._state.deadlock = deadlock
        abort_collectives(self._state)

    def ping(self) -> None:
        """Do nothing. An answer shows that the process is alive."""

    def export_state(self, room: float, newest: Age, known: Age) -> tuple[bytes, np.ndarray[Any, Any]] | str | None:
        """Return the state that this process holds, so that the controller can keep it after this node is removed.

        Args:
            room: Number of bytes for which the controller has room.
            newest: Age of the newest complete state that the controller holds.
            known: Age of a state of which another worker has exported what all ranks hold.

        Returns:
            Metadata and bytes of a snapshot; None if the controller has a state of at least this age or this process has none; a message if
            the state is too large for the controller.
        """
        held = self._state.held
        if held is None or held.age <= newest:
            return None
        if held.state.whole_bytes > room:  # other workers may hold the rest, which is useless without this part
            return f"its size of {held.state.whole_bytes / 2**20:.0f} MiB is more than half of the memory that is free on the head"
        state = held.state.own if held.age == known and not held.state.is_whole else held.state
        meta, data = packed(held.plan_digest, held.age, state, held.rows)
        return meta, np.frombuffer(data, np.uint8)

    def offered(self, plan_digest: str) -> Described:
        """Return the description of the state of a plan that this process holds, if it holds one."""
        held = self._state.held
        return described(Offer(held).answers() if held and held.plan_digest == plan_digest else ())

    def offered_values(self) -> Common:
        """Return what all ranks take over from a process that has committed the state: its values, rows and table of tensors."""
        held = self._state.held
        assert held is not None
        return held.values, held.rows, held.state.expected

    def serve_parts(self) -> PartAddress:
        """Serve parts of the state that this process holds, until it joins a group. Return where."""
        if self._parts is None:
            self._parts = PartServer(node_address(), self._held_states)
        return self._parts.address

    def _held_states(self) -> list[RankState]:
        held = self._state.held
        return [held.state] if held else []

    def leave_group(self, timeout_s: float) -> Departure:
        """End everything that the group has left running in this process.

        Args:
            timeout_s: Maximum seconds for which the train function may make no progress, such as copying its state to host memory. If
                it makes progress, this method returns "busy" after about this time, and must be called again.
        """
        is_first, runner = not self._state.has_ended, get_train_context().execution_context.training_thread_runner
        thread, wait_s = runner._thread, timeout_s
        if is_first:
            self.shutdown()  # type: ignore[no-untyped-call]
        elif thread is not None:
            wait_s = min(self._state.progress.left_s(timeout_s), timeout_s)
        if thread is not None:
            self._state.has_ended = True  # stops a function that computes, which no aborted collective would stop
            thread.join(PROMPT_END_S)
            if is_first:
                abort_collectives(self._state)  # another rank may be waiting for this one
            if self._state.failure is not None and not self._state.is_sound:
                return "unusable"  # whatever is left of the function, such as the shutdown of Horovod, has no effect on others
            thread.join(max(wait_s, 0.0))
            if thread.is_alive():
                return "busy" if self._state.progress.left_s(timeout_s) > 0 else "unusable"
        is_usable = (runner.get_error() is None or self._state.is_sound) and not self._state.is_spent
        return "left" if is_usable and self._renew() else "unusable"

    def _renew(self) -> bool:
        """Execute the script once more for the next group, and return whether this process can do so.

        A script can change its process so that its top level fails a second time. Another process then takes the place of this one.
        """
        try:
            if self._execute_script:
                self._execute_script()
        except Exception as error:  # whatever the script raises
            logging.getLogger("undula").info(
                "the process is replaced, because the script cannot be executed again: %s", error
            )
            return False
        return True

    def kill_process(self, other: ProcessIdentity) -> None:
        """Send SIGKILL to another worker on this machine, because a suspended process does not react to Ray.

        Nothing happens if the worker has ended, even if another process has received its process id, or if it runs in another container.
        """
        if process := find_process(other):
            send_signal(process, signal.SIGKILL)


def rehearse_steps(train_fn: Callable[[], Any]) -> bool:
    """Rehearse a step if the trainer's own function, which Ray has wrapped, can do so and wants to. Return whether it did."""
    rehearse = getattr(inspect.unwrap(train_fn), "rehearse", None)
    return rehearse is not None and bool(rehearse(reserved_device()))


def abort_collectives(state: WorkerState) -> None:
    """Make the rendezvous and collectives of this process's groups fail, here and on the ranks that wait for this one.

    Gloo's connections are cut first, because a thread that an aborted NCCL collective releases must not be able to commit a step over gloo.
    """
    cut_connections(listening_ports() - state.own_ports)
    cut_sockets(state.collective_sockets)
    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()  # has no effect on gloo


def name_of_node() -> str:
    """Return the address and the short id of this node, as `ray list nodes` shows them."""
    return f"{node_address()} ({ray.get_runtime_context().get_node_id()[:8]})"


def resident_memory() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def fault_in(num_bytes: int) -> None:
    """Extend this process's heap by memory that the heap keeps after it is freed (see KEEP_HEAP in undula.elastic.ray.environment)."""
    pieces = range(min(num_bytes, FAULT_IN_BYTES) // PIECE_BYTES)
    held = [torch.ones(PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in pieces]
    del held


def warm_up(device: torch.device) -> None:
    """Run one step of a tiny model on the device of this worker, so that torch imports its modules and CUDA creates its context."""
    model = torch.nn.Linear(2, 2, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(2, 2, device=device)).sum().backward()
    optimizer.step()
    for module in LATE_IMPORTS:
        import_module(module)
    from undula.state.model_state import load_state, model_and_optimizer_state

    load_state(model, optimizer, model_and_optimizer_state(model, optimizer))
    gc.collect()
