"""Training of a job in this process, without Ray: the way to debug a script."""

import atexit
import gc
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from undula.config.job import LoadedSpec
from undula.driver.preflight import Prepared, on_machines
from undula.driver.record import LaunchSpec
from undula.driver.training import Place, TrainFunction
from undula.errors import INTERRUPTED, CheckpointError, SpecError, StorageError, UsageError, end_on_sigterm, one_line
from undula.parallel.compile import compile_with_own_threads, problem_of_compiler
from undula.state.events import FailEvent, GroupEvent, StopEvent
from undula.state.heartbeat import keep_heartbeat
from undula.state.ledger import EventWriter
from undula.storage import Store
from undula.telemetry.live import INTERVAL_S, message_lines
from undula.telemetry.messages import Message, Status
from undula.telemetry.waits import CommonEvent, CommonRecorder
from undula.train.randomness import compute_deterministically
from undula.train.single_process import SingleProcess
from undula.train.tracebacks import place_in_script, with_place


@contextmanager
def in_process(loaded: LoadedSpec, prepared: Prepared) -> Iterator[Place]:
    """Open this process for a job, as its only worker.

    Raises:
        SpecError: The job needs a cluster, or torch cannot compile on this machine.
    """
    if loaded.spec.engine != "torch":
        raise SpecError(
            f"command line: --in-process cannot be combined with engine={loaded.spec.engine}; set engine=torch"
        )
    end_on_sigterm()
    atexit.register(gc.freeze)  # otherwise, the interpreter spends a second at exit on collecting torch's objects
    loaded = on_machines(loaded, torch.cuda.is_available)
    if loaded.spec.workers.gpus and not torch.cuda.is_available():
        raise SpecError(f"{loaded.origin('workers.gpus')}: torch sees no GPU in this process; set workers.gpus=0")
    publish = _Screen(CommonRecorder(prepared.store))
    yield Place(loaded, publish, partial(_fit, prepared.store, publish))


@dataclass
class _Screen:
    """Publisher that prints messages. Status lines are printed once a second, and at the end of the run."""

    common: CommonRecorder
    _shown_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, message: Message) -> None:
        if isinstance(message, CommonEvent) and not self.common.record(message):
            return
        with self._lock:
            if isinstance(message, Status):
                now = time.monotonic()
                if now - self._shown_at < INTERVAL_S and message.step < message.total_steps:
                    return
                self._shown_at = now
            for line in message_lines([message]):
                print(line, flush=True)


def _fit(store: Store, publish: _Screen, train: TrainFunction, spec: LaunchSpec) -> None:
    """Train.

    Raises:
        SystemExit: Ctrl-C or SIGTERM has ended the training. An event in the ledger records this.
        Exception: Any exception that the script raises.
    """
    # The order in which floating-point numbers are added can depend on the number of threads. Ray gives a worker one for each CPU.
    torch.set_num_threads(max(int(spec.workers.cpus), 1))
    device = torch.device("cuda", 0) if spec.workers.gpus else torch.device("cpu")
    if spec.job.deterministic:
        compute_deterministically()
    if spec.job.compile:
        if device.type == "cpu":
            compile_with_own_threads()
        if problem := problem_of_compiler(device):
            raise SpecError(problem)
    job = replace(spec.job, data=replace(spec.job.data, read_tasks=0))
    process = SingleProcess(train, job, publish, device=device)
    print(f"{store.url}: training in this process, on {_name_of(device)} ...", flush=True)
    events = EventWriter(store, "driver")
    events.event(GroupEvent(({"rank": 0, "node": socket.gethostname(), "pid": os.getpid()},), spec.job.submission))
    try:
        with keep_heartbeat(store):
            process()
    except KeyboardInterrupt:
        events.event(StopEvent())
        raise SystemExit(INTERRUPTED) from None
    except SystemExit:
        events.event(StopEvent())
        raise
    except Exception as error:
        story = "".join(traceback.format_exception(error))
        place = place_in_script(story)
        with suppress(StorageError):  # which may be the error itself
            events.event(FailEvent(f"{type(error).__name__}: {one_line(error)}" + (f" at {place}" if place else "")))
        if isinstance(error, UsageError | CheckpointError):
            raise with_place(error, story) from error
        raise


def _name_of(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
