"""Process of a trial under Ray Tune. It trains in a thread and reports each measurement of the study's metric to Tune."""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, isfinite
from queue import SimpleQueue
from time import sleep
from typing import Any

import ray
from ray.train import TrainingFailedError
from ray.tune import Trainable

from undula.driver.launch import launch
from undula.driver.record import LaunchSpec
from undula.driver.trackers import Tracking
from undula.elastic.pure.spec import WorkersSpec
from undula.elastic.ray.failures import whole_story
from undula.elastic.ray.gpus import hide_unreserved_gpus, refuse_unseen_gpus, reserved_device
from undula.errors import StorageError
from undula.masking.values import mask
from undula.storage import Store, open_store
from undula.study.records import EVENT_OF
from undula.study.trials import State
from undula.telemetry.event_recorder import EventRecorder
from undula.telemetry.hub import HubFollower, HubPublisher, start_hub
from undula.telemetry.messages import Message, Publisher, Status
from undula.telemetry.prometheus import RunMetrics
from undula.telemetry.registry import standing_trackers
from undula.train.run import Run
from undula.train.single_process import SingleProcess

HUB_INTERVAL_S = 0.25
"""Time in seconds between two reads of the hub of a trial that has its own workers."""
LEAVE_LIMIT_S = 30.0
"""Maximum time in seconds for a trial to stop at its next step when it is no longer wanted. After that, its process exits."""
STORAGE_PAUSES_S = (2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0)
"""Pauses in seconds before a trial resumes from its newest checkpoint after an error of the storage. After the last one, it fails."""


@dataclass(frozen=True)
class TrialSpec:
    """Specification of a trial for its process."""

    launch: LaunchSpec
    metric: str
    """Metric of the study."""
    is_packed: bool
    """Whether the trial trains in its own process, without workers."""


@dataclass(frozen=True)
class TrialUpdate:
    """Result of a trial for Ray Tune: a measurement, the end of the trial, or both."""

    step: int
    """Number of committed steps."""
    loss: float
    """Last value of the study's metric."""
    is_measured: bool
    """Whether `loss` is a new measurement."""
    state: State = "running"
    message: str = ""
    """Reason why the trial failed or diverged; empty otherwise."""


class TrialProcess(Trainable):
    """Trial of Ray Tune. Its results are TrialUpdates, the last of which has the state in which the trial ended."""

    def setup(self, config: dict[str, Any], train: Callable[[Run], None] | None = None) -> None:
        assert train is not None
        hide_unreserved_gpus()
        self._train = train
        self._thread: threading.Thread | None = None
        self._here: SingleProcess | None = None
        self._read_spec(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Switch to another trial in the same process, which keeps its imports."""
        self._leave()
        self._read_spec(new_config)
        return True  # Tune would count any other value as a failure of the new trial

    def step(self) -> dict[str, Any]:
        """Wait for the next update and return it."""
        if not self._has_begun:
            self._begin()
        update = self._updates.get()
        return {**asdict(update), "done": update.state != "running"}

    def cleanup(self) -> None:
        """Wait until a packed trial has stopped. A trial with its own workers ends with this process."""
        if self._thread and self._spec.is_packed:
            self._leave()
            self._thread.join(LEAVE_LIMIT_S)

    def _leave(self) -> None:
        """Stop a trial that trains in this process at its next step."""
        if self._here:
            self._here.leave()

    def _read_spec(self, config: dict[str, Any]) -> None:
        self._spec: TrialSpec = ray.cloudpickle.loads(config["spec"])
        self._has_begun = False

    def _begin(self) -> None:
        """Start the trial. This is not part of setup, because Tune drops a process in setup if another one becomes free."""
        self._has_begun = True
        self._updates: SimpleQueue[TrialUpdate] = SimpleQueue()
        spec, former = self._spec, self._thread
        listener = Listener(spec.metric, self._updates.put, self._leave if spec.is_packed else None)
        training: Callable[[], None]
        if spec.is_packed:
            metrics = RunMetrics(spec.launch.job.name)

            def publish(message: Message) -> None:
                metrics.add(message)
                listener(message)

            self._here = SingleProcess(self._train, spec.launch.job, publish, device=reserved_device())
            training = partial(train_in_process, self._here, open_store(spec.launch.job.run_url), metrics)
        else:
            training = partial(train_with_workers, self._train, spec.launch, listener)
        self._thread = threading.Thread(
            target=_run_training, args=(training, listener, former), name="undula-trial", daemon=True
        )
        self._thread.start()


class Listener:
    """Listener that turns the messages of a run into updates of its trial. A loss that is not finite ends the trial.

    Args:
        metric: Metric of the study.
        report: Callback that receives the updates.
        leave: Function that stops a run in this process at its next step. The end of the trial is then reported only after the run has
            stopped, so that nothing is written after it. None for a trial with its own workers.
    """

    def __init__(self, metric: str, report: Callable[[TrialUpdate], None], leave: Callable[[], None] | None = None):
        self._event_type = EVENT_OF[metric]
        self._report = report
        self._leave = leave
        self._last = TrialUpdate(0, inf, is_measured=False)

    def __call__(self, message: Message) -> None:
        if self._last.state != "running":
            return
        if isinstance(message, Status) and not isfinite(message.loss):
            update = TrialUpdate(message.step, message.loss, is_measured=False)
            self._end_as_diverged(replace(update, message=f"its training loss was {message.loss}"))
        elif isinstance(message, self._event_type):
            update = TrialUpdate(message.step, message.loss, is_measured=True)
            if isfinite(message.loss):
                self._last = update
                self._report(update)
            else:
                self._end_as_diverged(replace(update, message=f"its loss was {message.loss}"))

    def ended(self, error: str | None) -> None:
        """Report that the run has ended, with the message of the error if it failed."""
        if self._last.state == "running":
            state: State = "failed" if error else "complete"
            self._report(replace(self._last, is_measured=False, state=state, message=error or ""))
        elif self._leave:
            self._report(self._last)

    def _end_as_diverged(self, update: TrialUpdate) -> None:
        self._last = replace(update, state="diverged")
        if self._leave:
            self._leave()
        else:
            self._report(self._last)


def _run_training(training: Callable[[], None], listener: Listener, former: threading.Thread | None) -> None:
    """Train once the former run of this process has stopped, and report the end in any case, because the trial waits for it."""
    if former is not None:
        former.join(LEAVE_LIMIT_S)
        if former.is_alive():
            os._exit(1)  # Tune restarts the trial in another process
    try:
        training()
    except BaseException as error:
        listener.ended(_in_one_line(error))
    else:
        listener.ended(None)


def _in_one_line(error: BaseException) -> str:
    """Return the type and message of an error, such as `KeyError: 'width'`, without secrets."""
    if isinstance(error, TrainingFailedError) and (story := mask(whole_story(error)).strip()):
        return story.splitlines()[-1]
    return f"{type(error).__name__}: {' '.join(mask(str(error)).split())}".removesuffix(": ")


def train_in_process(training: SingleProcess, store: Store, metrics: RunMetrics) -> None:
    """Train in this process, without workers. After an error of the storage, the run resumes after a pause.

    Args:
        training: The training.
        store: Run directory of the trial.
        metrics: Metrics of the trial, which end with it.

    Raises:
        ClusterError: torch does not see the GPUs that this process has reserved.
        Exception: Any exception that the script raises.
    """
    refuse_unseen_gpus()
    with closing(metrics), _tracking(store, lambda event: None):
        for pause_s in STORAGE_PAUSES_S:
            try:
                return training()
            except StorageError:
                sleep(pause_s)
        return training()


def train_with_workers(train: Callable[[Run], None], spec: LaunchSpec, listener: Listener) -> None:
    """Train with elastic workers of the trial."""
    store = open_store(spec.job.run_url)
    hub = start_hub(store)

    def handle(messages: list[Message]) -> None:
        for message in messages:
            listener(message)

    try:
        with HubFollower(hub, handle, HUB_INTERVAL_S), _tracking(store, HubPublisher(hub)):
            launch(train, spec, store, hub)
    finally:
        ray.kill(hub)


def _tracking(store: Store, publish: Publisher) -> Tracking:
    """Return a block in which the trackers that show all runs show a trial, too."""
    return Tracking(standing_trackers(store), store, EventRecorder(store, publish))


def resources(workers: WorkersSpec, packed: int | None) -> Mapping[str, float]:
    """Return the resources that Ray reserves for the process of a trial.

    Args:
        workers: The job's workers.
        packed: Number of trials that share the resources of one worker; None if each trial has its own workers. Its process then runs
            on the head node and reserves almost nothing.
    """
    if packed is None:
        return {"CPU": 0.0, "node:__internal_head__": 0.001}
    return {name: amount / packed for name, amount in workers.per_worker.items() if amount}
