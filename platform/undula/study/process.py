"""The process of a trial under Ray Tune: it trains in a thread, and tells each measurement of the study's metric."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, isfinite
from queue import SimpleQueue
from typing import Any

import ray
from ray.tune import Trainable

from undula.elastic.failures import whole_story
from undula.elastic.fleet import Work
from undula.elastic.horovod import HorovodConfig
from undula.elastic.spec import HorovodSpec, WorkersSpec
from undula.elastic.trainer import elastic_trainer
from undula.run.alone import Alone
from undula.run.hub import HubPublisher, TellEverywhere, start_hub
from undula.run.job import Job
from undula.run.loop import Run
from undula.run.messages import Message, Status
from undula.run.worker import Worker, open_data
from undula.state.ledger import Event
from undula.storage import open_store
from undula.study.records import EVENT_OF
from undula.study.trials import State

HUB_INTERVAL_S = 0.25
NO_MORE = 30.0
"""Seconds in which a training that is not wanted any more leaves at its next step."""


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
        self._begin(ray.cloudpickle.loads(config["order"]))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Another trial in the same process: its imports and its memory stay."""
        if not self._end():
            return False
        self._begin(ray.cloudpickle.loads(new_config["order"]))
        return True

    def step(self) -> dict[str, Any]:
        news = self._news.get()
        return {**asdict(news), "done": news.state != "running"}

    def cleanup(self) -> None:
        self._end()

    def _begin(self, order: Order) -> None:
        self._news: SimpleQueue[News] = SimpleQueue()
        self._listener = Listener(order.metric, self._news.put)
        start = train_here if order.is_packed else train_with_workers
        training = partial(start, self._train, order, self._listener)
        self._thread = threading.Thread(target=_told, args=(training, self._listener), name="undula-trial", daemon=True)
        self._thread.start()

    def _end(self) -> bool:
        """Leave the training; whether it has ended. One with workers of its own ends with this process."""
        Alone.leave()
        self._thread.join(NO_MORE)
        return not self._thread.is_alive()


class Listener:
    """Makes a trial's news of what its training tells; a loss that is not finite ends the trial."""

    def __init__(self, metric: str, tell: Callable[[News], None]):
        self._kind = EVENT_OF[metric]
        self._tell = tell
        self._last = News(0, inf, is_measured=False)
        self._first: float | None = None

    def __call__(self, message: Message) -> None:
        if isinstance(message, Status) and not isfinite(message.loss):
            self._say(News(message.step, message.loss, False, "diverged", f"its training loss was {message.loss}"))
        elif isinstance(message, Event) and message.kind == self._kind:
            loss = float(message.data["loss"])
            self._first = loss if self._first is None else self._first
            state, text = ("running", "") if isfinite(loss) else ("diverged", f"its loss was {loss}")
            self._say(News(message.step or 0, loss, True, state, text))  # type: ignore[arg-type]

    def ended(self, error: str | None) -> None:
        """The training is over: by itself, or with an error in words."""
        state: State = "failed" if error else "complete"
        if not error and self._first is not None and self._last.loss > self._first:
            state, error = "diverged", "its loss ended above where it began"
        self._say(replace(self._last, is_measured=False, state=state, message=error or ""))

    def _say(self, news: News) -> None:
        if self._last.state == "running":
            self._last = news
            self._tell(news)


def _told(training: Callable[[], None], listener: Listener) -> None:
    try:
        training()
    except Exception as error:
        listener.ended(whole_story(error).strip().splitlines()[-1])
    else:
        listener.ended(None)


def train_here(train: Callable[[Run], None], order: Order, listener: Listener) -> None:
    """In this process, alone."""
    Alone(train, order.job, listener)()


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
        TellEverywhere(store, publish),
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
