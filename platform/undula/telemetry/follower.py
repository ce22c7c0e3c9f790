"""The follower of a hub: a thread of the driver that reads the hub's messages and hands them on, for the live view and for trials."""

import threading
from collections.abc import Callable
from typing import Any

import ray

from undula.telemetry.messages import Message

END_LIMIT_S = 30.0
"""Maximum time in seconds that the end of a block waits for the last messages."""


class HubFollower:
    """Hands on what a hub receives, while its block runs. Messages that arrived before the block's end are all handed on.

    Args:
        hub: handle of the hub's actor.
        handle: receives the messages since the last call, in order; it runs in the follower's thread.
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
            is_last = self._closed.wait(self._interval_s)  # the read after the end brings the last messages
            position, messages = ray.get(self._hub.read.remote(position))
            self._handle(messages)
