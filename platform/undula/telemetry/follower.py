"""Follower of a hub: a thread of the driver that reads the messages of the hub, for the live view and for trials of studies."""

import threading
from collections.abc import Callable
from typing import Any

import ray

from undula.telemetry.messages import Message

END_LIMIT_S = 30.0
"""Maximum time in seconds to wait for the last messages at the end of a block."""


class HubFollower:
    """Context manager that passes the messages of a hub to a callback, including all messages that arrive before its block ends.

    Args:
        hub: Handle of the hub's actor.
        handle: Callback that receives the messages since its last call, in order. It runs in the follower's thread.
        interval_s: Seconds between two reads of the hub.
    """

    def __init__(self, hub: Any, handle: Callable[[list[Message]], None], interval_s: float):
        self._hub, self._handle, self._interval_s = hub, handle, interval_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="undula-follower", daemon=True)

    def __enter__(self) -> "HubFollower":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join(END_LIMIT_S)

    def _follow(self) -> None:
        position, is_last = 0, False
        while not is_last:
            is_last = self._closed.wait(
                self._interval_s
            )  # once the block has ended, one more read gets the last messages
            position, messages = ray.get(self._hub.read.remote(position))
            self._handle(messages)
