"""The process of a trial under Ray Tune: it trains in a thread, and tells each measurement of the study's metric."""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, isfinite
from queue import SimpleQueue
from time import sleep
from typing import Any

import ray
from ray.train import TrainingFailedError
from ray.tune import Trainable

from undula.elastic.pure.fleet import Work
from undula.elastic.pure.spec import HorovodSpec, WorkersSpec
from undula.elastic.ray.failures import whole_story
from undula.elastic.ray.horovod import HorovodConfig
from undula.elastic.ray.trainer import elastic_trainer
from undula.elastic.worker import Worker, open_data
from undula.errors import StorageError
from undula.storage import open_store
from undula.study.records import EVENT_OF
from undula.study.trials import State
from undula.telemetry.hub import EventRecorder, HubPublisher, start_hub
from undula.telemetry.messages import Message, Status
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import Alone

HUB_INTERVAL_S = 0.25
LEAVE_LIMIT_S = 30.0
"""In which a training that is not wanted any more leaves at its next step; after it the process ends."""
STORAGE_PAUSES_S = (2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0)
"""Before a training whose storage failed goes on from its newest checkpoint; a trial that has failed is not run again."""


@dataclass(frozen=True)
class Order:
    """What a trial's process is told to train."""

    job: Job
    workers: WorkersSpec
    horovod: HorovodSpec | None
    """None with torch's engine."""
    metric: str
    is_packed: bool
    """Whether it trains in the trial's process itself, and not with workers of its own."""
    work: Work


@dataclass(frozen=True)
class News:
    """Of a training, for its trial: a measurement, its end, or both."""

    step: int
    loss: float
    is_measured: bool
    """Whether `loss` was measured just now."""
    state: State = "running"
    message: str = ""


class TrialProcess(Trainable):
    """A trial for Ray Tune; each of its results is a measurement, and the last says how it ended."""

    def setup(self, config: dict[str, Any], train: Callable[[Run], None] | None = None) -> None:
        assert train is not None
        self._train = train
        self._thread: threading.Thread | None = None
        self._take(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Another trial in the same process: its imports and its memory stay."""
        Alone.leave()
        self._take(new_config)
        return True  # Tune would take any other answer for the new trial's failure

    def step(self) -> dict[str, Any]:
        if not self._has_begun:
            self._begin()
        news = self._news.get()
        return {**asdict(news), "done": news.state != "running"}

    def cleanup(self) -> None:
        if self._thread and self._order.is_packed:  # one with workers of its own ends with this process
            Alone.leave()
            self._thread.join(LEAVE_LIMIT_S)

    def _take(self, config: dict[str, Any]) -> None:
        self._order: Order = ray.cloudpickle.loads(config["order"])
        self._has_begun = False

    def _begin(self) -> None:
        """At the first step, as Tune drops a process that is still starting where a former one has come free for its trial."""
        self._has_begun = True
        self._news: SimpleQueue[News] = SimpleQueue()
        order, after = self._order, self._thread
        listener = Listener(order.metric, self._news.put, Alone.leave if order.is_packed else None)
        start = train_here if order.is_packed else train_with_workers
        training = partial(start, self._train, order, listener)
        self._thread = threading.Thread(
            target=_trained, args=(training, listener, after), name="undula-trial", daemon=True
        )
        self._thread.start()


class Listener:
    """Makes a trial's news of what its training tells; a loss that is not finite ends the trial.

    Args:
        metric: of the study.
        tell: called with the news.
        leave: ends a training in this process at its next step. Its trial ends when it has left, so that nothing is written after.
    """

    def __init__(self, metric: str, tell: Callable[[News], None], leave: Callable[[], None] | None = None):
        self._event_type = EVENT_OF[metric]
        self._tell = tell
        self._leave = leave
        self._last = News(0, inf, is_measured=False)

    def __call__(self, message: Message) -> None:
        if self._last.state != "running":
            return
        if isinstance(message, Status) and not isfinite(message.loss):
            self._diverged(News(message.step, message.loss, False, message=f"its training loss was {message.loss}"))
        elif isinstance(message, self._event_type):
            news = News(message.step, message.loss, is_measured=True)
            if isfinite(message.loss):
                self._last = news
                self._tell(news)
            else:
                self._diverged(replace(news, message=f"its loss was {message.loss}"))

    def ended(self, error: str | None) -> None:
        """The training is over: by itself, or with an error in words."""
        if self._last.state == "running":
            state: State = "failed" if error else "complete"
            self._tell(replace(self._last, is_measured=False, state=state, message=error or ""))
        elif self._leave:
            self._tell(self._last)

    def _diverged(self, news: News) -> None:
        self._last = replace(news, state="diverged")
        if self._leave:
            self._leave()
        else:
            self._tell(self._last)


def _trained(training: Callable[[], None], listener: Listener, after: threading.Thread | None) -> None:
    """Train once the process's former training has left; whatever comes of it is told, as its trial waits for that."""
    if after is not None:
        after.join(LEAVE_LIMIT_S)
        if after.is_alive():
            os._exit(1)  # Tune begins the trial again, in another process
    try:
        training()
    except BaseException as error:
        listener.ended(_in_one_line(error))
    else:
        listener.ended(None)


def _in_one_line(error: BaseException) -> str:
    """`KeyError: 'width'`."""
    if isinstance(error, TrainingFailedError) and (story := whole_story(error).strip()):
        return story.splitlines()[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def train_here(train: Callable[[Run], None], order: Order, listener: Listener) -> None:
    """In this process, alone."""
    for pause_s in STORAGE_PAUSES_S:
        try:
            return Alone(train, order.job, listener)()
        except StorageError:
            sleep(pause_s)
    return Alone(train, order.job, listener)()


def train_with_workers(train: Callable[[Run], None], order: Order, listener: Listener) -> None:
    """As an elastic run of its own."""
    store = open_store(order.job.run_url)
    hub = start_hub(store)
    publish = HubPublisher(hub)
    horovod = HorovodConfig(**vars(order.horovod)) if order.horovod else None
    trainer = elastic_trainer(
        Worker(train, order.job, publish),
        horovod,
        order.workers,
        order.work,
        store,
        EventRecorder(store, publish),
        prepare=partial(open_data, order.job),
    )
    over = threading.Event()
    follower = threading.Thread(target=_follow, args=(hub, listener, over), name="undula-hub", daemon=True)
    follower.start()
    try:
        trainer.fit()
    finally:
        over.set()
        follower.join()
        ray.kill(hub)


def _follow(hub: Any, listener: Listener, over: threading.Event) -> None:
    position, is_last = 0, False
    while not is_last:
        is_last = over.wait(HUB_INTERVAL_S)  # after the end once more, for the last messages
        position, messages = ray.get(hub.read.remote(position))
        for message in messages:
            listener(message)


def resources(workers: WorkersSpec, packed: int | None) -> Mapping[str, float]:
    """What Ray reserves for a trial: a share of what a worker has, or a place beside the driver, whose workers have theirs."""
    if packed is None:
        return {"CPU": 0.0, "node:__internal_head__": 0.001}
    own = {"CPU": workers.cpus, "GPU": workers.gpus, **workers.resources}
    return {name: amount / packed for name, amount in own.items() if amount}
