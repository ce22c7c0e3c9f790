"""Train function of a job, which Ray Train runs on every worker: it creates the Run, calls the script and forwards its output."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import psutil
import ray
import ray.train
import ray.train.torch
import torch

from undula.data.script.loader_processes import start_fork_server
from undula.data.stored.mixture import load_data
from undula.data.stored.reader import stored_reader
from undula.elastic.network import node_address, use_interface
from undula.elastic.ray.actor import worker_state
from undula.elastic.ray.gpus import reserved_device
from undula.errors import ClusterError, StorageError, UndulaError, UsageError
from undula.masking.exceptions import mask_error
from undula.masking.output import mask_output
from undula.parallel.compile import compile_with_own_threads, problem_of_compiler
from undula.parallel.layout import join_layout
from undula.plan.plan import Plan
from undula.recovery.leaving_workers import LeavingWorkers
from undula.recovery.progress import COMPILE_S, LEFT
from undula.recovery.replica import ReplicaClient
from undula.recovery.worker_state import LeaveGroup, WorkerState
from undula.storage import waits_reported_to
from undula.telemetry.hub import logging_of_script, output_to_driver
from undula.telemetry.messages import Publisher
from undula.telemetry.waits import WaitPublisher
from undula.train.dry_run.rehearsal import rehearse
from undula.train.job import Job
from undula.train.randomness import compute_deterministically, fix_threads
from undula.train.run import Run, call_train
from undula.train.script_file import ScriptFile, make_ready
from undula.train.session import GroupSession
from undula.train.setup import RunSetup
from undula.train.tracebacks import is_of_collective, keep_traceback
from undula.train.work_folder import work_folder


@dataclass(frozen=True)
class JobWorker:
    """Train function of a job, for Ray Train's argument `train_loop_per_worker`."""

    train: Callable[[Run], None]
    job: Job
    publish: Publisher

    def rehearse(self, device: torch.device) -> bool:
        """Let torch compile the model before this process joins a group. Return whether the job compiles its model.

        What is compiled is code of one execution of the script, so that all groups then use this one.
        """
        if self.job.compile:
            make_ready(self.train, keeps=True)
            rehearse(self.train, self.job, device, self.publish)
        return self.job.compile

    @property
    def execute_script(self) -> Callable[[], None] | None:
        """Function that executes the script for the next group; None if the train function does not come from a file."""
        return partial(_execute, self.train) if isinstance(self.train, ScriptFile) else None

    def __call__(self) -> None:
        context = ray.train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
        worker = worker_state()
        worker.is_run = True
        _leave_batch_scheduling()
        mask_output()
        with output_to_driver(self.publish, rank), waits_reported_to(WaitPublisher(self.publish)):
            device, local_rank = ray.train.torch.get_device(), context.get_local_rank()
            run: Run | None = None
            try:
                make_ready(self.train)
                layout = join_layout(rank, world_size, device, local_rank)
                leavers = LeavingWorkers(worker.controller) if worker.controller else None
                session = GroupSession(RunSetup.of(self.job, layout, worker, self.publish, _replicas(worker), leavers))
                run = Run(session)
                files = work_folder()
                if files:
                    files.begin(session.setup.store, layout.is_first)
                self._call(run, session)
                if files and layout.is_first:
                    files.bring(session.setup.store)
            except LeaveGroup:
                assert run is not None
                run.hand_over()
                worker.progress.enter(LEFT)
            except Exception as raised:
                error = raised
                if worker.deadlock and is_of_collective(raised):
                    error = UsageError(worker.deadlock)
                worker.is_sound = is_of_collective(error) or isinstance(error, StorageError)
                keep_traceback(error)
                continues = not isinstance(error, UsageError)
                if run is not None and continues:
                    with suppress(Exception):  # the state cannot be copied from a GPU that has failed
                        run.hand_over()
                worker.failure = error
                traceback.clear_frames(raised.__traceback__)  # the script's variables also keep the model in memory
                raise error from None
            finally:
                if run is not None:
                    run.free()

    def _call(self, run: Run, session: GroupSession) -> None:
        try:
            call_train(self.train, run, session)
        except (LeaveGroup, Exception):
            raise
        except BaseException as error:  # which another group would raise again; Ctrl-C does not reach this thread
            raise UsageError(
                f"the script ended rank {run.rank} with {type(error).__name__}; raise an Exception that says why"
            ) from error


def _execute(script: ScriptFile) -> None:
    mask_output()  # also after an execution that has replaced the streams
    try:
        with logging_of_script():
            script.make_ready()
    except Exception as error:
        mask_error(error)  # which Ray writes to its logs
        raise


def prepare_worker(job: Job, publish: Publisher, interfaces: Sequence[str] | None = None) -> None:
    """Prepare a worker's process for a job before it computes anything.

    Raises:
        ClusterError: The node has none of the network interfaces that the job names.
    """
    if interfaces:
        use_interface(interfaces, node_address())
    fix_threads()
    if job.deterministic:
        compute_deterministically()
    if job.compile:
        _check_compiler()
    with waits_reported_to(WaitPublisher(publish)):
        open_data(job)


def preparation_s(job: Job) -> float:
    """Return the seconds for which a job's own preparation of a worker may take longer than a start."""
    return COMPILE_S if job.compile else 0.0


def _check_compiler() -> None:
    """Check that torch can compile on this node.

    Raises:
        ClusterError: It cannot.
    """
    device = reserved_device()
    if device.type == "cpu":
        compile_with_own_threads()
    if problem := problem_of_compiler(device):
        raise ClusterError(problem)


def open_data(job: Job) -> None:
    """Read a window of a job's data, so that connections are open and memory is allocated before the first batch is needed.

    Only the script can open a dataset of its own. For that, loader processes are made ready.
    """
    if job.script_data is not None:
        if job.script_data.num_workers:
            start_fork_server(waits=True)
        return
    with suppress(UndulaError, OSError):  # the run reports the error when it reads the data itself
        data = load_data(job.data)
        stored_reader(data, Plan(job.plan, data.num_rows), range(1), job.data).any_rows(1)


def _replicas(worker: WorkerState) -> ReplicaClient | None:
    """Return a client of the controller's replica store, or None if the controller has no replica store."""
    if worker.controller is None:
        return None
    context = ray.train.get_context()
    is_elsewhere = ray.get_runtime_context().get_node_id() != worker.home
    world_size = context.get_world_size()
    shares_node = context.get_local_world_size() == world_size
    return ReplicaClient(worker.controller, context.get_world_rank(), world_size, is_elsewhere, shares_node)


def _leave_batch_scheduling() -> None:
    """Give this process precedence over Ray's daemons, which are batch processes in a cluster that undula.cluster.local has started."""
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_BATCH:
        for thread in psutil.Process().threads():  # the threads that run collectives need it as well
            os.sched_setscheduler(thread.id, os.SCHED_OTHER, os.sched_param(0))
