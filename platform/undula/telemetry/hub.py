"""Hub of a run: an actor that carries messages from the workers and the controller to the driver, and marks the run as active."""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import ray
from ray.exceptions import RayActorError

from undula.errors import RunError
from undula.storage import Store
from undula.telemetry.messages import Line, Message, Publisher
from undula.telemetry.prometheus import RunMetrics
from undula.telemetry.waits import CommonEvent, CommonRecorder

UNRECORDED: dict[str, Any] = {"enable_task_events": False}
"""Options for actors that are called several times a second, so that Ray's head does not store up to 100,000 of these calls."""
NAMESPACE = "undula"
KEPT_MESSAGES = 10_000
"""Number of messages that the hub keeps; older ones are dropped."""
END_LIMIT_S = 30.0
"""Maximum time in seconds to wait for the last messages at the end of a follower's block."""
LOST = (
    "The process that passes on what workers report was lost, perhaps because the head's memory ran out. Nothing more of the run is shown "
    "here; its ledger goes on as long as the run does."
)


class Hub:
    """Actor that keeps messages in the order of their arrival, exports metrics, and records what several processes report.

    Args:
        store: Run directory.
    """

    def __init__(self, store: Store) -> None:
        self._common = CommonRecorder(store)
        self._metrics = RunMetrics(store.url.rstrip("/").rpartition("/")[2])
        self._messages: deque[tuple[int, Message]] = deque(maxlen=KEPT_MESSAGES)
        self._count = 0

    def publish(self, message: Message) -> None:
        """Add a message, unless it is an event that another process has reported already."""
        if isinstance(message, CommonEvent) and not self._common.record(message):
            return
        self._metrics.add(message)
        self._messages.append((self._count, message))
        self._count += 1

    def read(self, start: int) -> tuple[int, list[Message]]:
        """Return the number of the next message, and the messages from number `start` on."""
        return self._count, [message for number, message in self._messages if number >= start]


class HubFollower:
    """Context manager that passes the messages of a hub to a callback, including all messages that arrive before its block ends.

    Args:
        hub: Handle of the hub's actor.
        handle: Callback that receives the messages since its last call, in order. It runs in the follower's thread.
        interval_s: Seconds between two reads of the hub.
        position: Number of the first message to read.

    Attributes:
        position: Number of the next message to read.
    """

    def __init__(self, hub: Any, handle: Callable[[list[Message]], None], interval_s: float, position: int = 0):
        self._hub, self._handle, self._interval_s = hub, handle, interval_s
        self.position = position
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="undula-follower", daemon=True)

    def __enter__(self) -> "HubFollower":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join(END_LIMIT_S)

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            # After the end of the block, one more read gets the last messages.
            is_last = self._closed.wait(self._interval_s)
            try:
                self.position, messages = ray.get(self._hub.read.remote(self.position))
            except RayActorError:
                print(LOST, file=sys.stderr, flush=True)
                return
            self._handle(messages)


@dataclass(frozen=True)
class HubPublisher:
    """Sends messages to a hub from anywhere in the cluster, without waiting for it."""

    hub: Any

    def __call__(self, message: Message) -> None:
        self.hub.publish.remote(message)


def start_hub(store: Store) -> Any:
    """Start the hub of a run on this node, and return its handle. The hub ends with this driver.

    Raises:
        RunError: Another job on this cluster is training the run.
    """
    node = ray.get_runtime_context().get_node_id()
    actor = ray.remote(num_cpus=0, label_selector={"ray.io/node-id": node}, **UNRECORDED)(Hub)
    try:
        return actor.options(name=f"hub {store.path()}", namespace=NAMESPACE).remote(store)
    except ValueError:
        raise RunError(
            f"{store.url} is being trained by another job on this cluster; wait for it, stop it, or use another name"
        ) from None


class _Tee:
    """Stream in place of sys.stdout or sys.stderr that also publishes each complete line.

    A process has one for each of the two, in all its groups, because a handler of `logging` keeps the stream that it once got.
    """

    def __init__(self) -> None:
        self._rest = ""

    def begin(self, stream: TextIO, publish: Publisher, rank: int) -> None:
        if not isinstance(stream, _Tee):  # otherwise, a block of another thread has not ended
            self._stream = stream
        self._publish, self._rank = publish, rank

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._publish_line(line)
        self._rest = self._rest.rpartition("\r")[2]  # a progress bar writes over itself
        return self._stream.write(text)

    def end(self) -> TextIO:
        """Publish the last line, and return the stream that was replaced."""
        if self._rest:
            self._publish_line(self._rest)
        self._rest = ""
        return self._stream

    def _publish_line(self, line: str) -> None:
        self._publish(Line(self._rank, line.rstrip("\r").rpartition("\r")[2]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_tees = {"stdout": _Tee(), "stderr": _Tee()}


_of_script: tuple[list[logging.Handler], int] = [], logging.WARNING
"""Handlers and level that the script has given to the root logger."""


@contextmanager
def logging_of_script() -> Iterator[None]:
    """Let the script configure the root logger in a block, as in a new process, and keep what it has configured for `output_to_driver`."""
    global _of_script
    _of_script = [], logging.WARNING
    with output_to_driver(lambda message: None, 0):
        logging.root.handlers.clear()  # those that the script has added for a former group, which it adds again
        logging.root.setLevel(logging.WARNING)
        yield
    _of_script = [*logging.root.handlers], logging.root.level


def _leave_root_logger_to_script() -> None:
    """Undo what Ray does to the root logger when a group starts: it replaces its handlers, and with handlers there,
    `logging.basicConfig` does nothing.
    """
    handlers, level = _of_script
    for handler in [each for each in logging.root.handlers if type(each).__module__.partition(".")[0] == "ray"]:
        logging.root.removeHandler(handler)
        logging.root.setLevel(level)
    for handler in handlers:
        logging.root.addHandler(handler)


@contextmanager
def output_to_driver(publish: Publisher, rank: int) -> Iterator[None]:
    """Send each line that this process prints in a block to the driver as well, so that the user sees what a script prints and logs.

    Args:
        publish: Callback that receives the lines.
        rank: Rank of this process.
    """
    _leave_root_logger_to_script()
    for name, tee in _tees.items():
        tee.begin(getattr(sys, name), publish, rank)
        setattr(sys, name, tee)
    try:
        yield
    finally:
        for name, tee in _tees.items():
            setattr(sys, name, tee.end())
