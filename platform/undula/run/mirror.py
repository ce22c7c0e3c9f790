"""A copy of a run's newest snapshot in the memory of its controller, for when all ranks are on one node and that one goes."""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from undula.state.snapshot import Snapshot

PUT_SHARE = 0.005
"""Of the time, for handing a copy to Ray, which takes memory bandwidth from the training."""
WAY_SHARE = 0.05
"""Of the time, for its way over the network."""


class Mirror:
    """Sends snapshots to the controller, and gets the newest one back.

    Args:
        controller: the actor, with ElasticController's `keep_snapshot` and `kept_snapshot`.
        sends: whether this process's snapshots need a copy.
    """

    def __init__(self, controller: Any, sends: bool):
        self._controller = controller
        self._sends = sends
        self._is_on_its_way = False
        self._next = 0.0

    def send(self, meta: Mapping[str, Any], data: memoryview) -> None:
        """Begin to send a snapshot, where it is time for one; the bytes are copied before this returns."""
        began = time.monotonic()
        if not self._sends or self._is_on_its_way or began < self._next:
            return
        copy = ray.put(np.frombuffer(data, np.uint8))
        self._next = began + (time.monotonic() - began) / PUT_SHARE
        self._is_on_its_way = True
        answer = self._controller.keep_snapshot.remote(dict(meta), copy).future()
        answer.add_done_callback(lambda answer: self._arrived(answer, began))

    def _arrived(self, answer: "Future[bool]", began: float) -> None:
        had_room = answer.exception() is None and answer.result()
        self._sends = self._sends and had_room
        self._next = max(self._next, began + (time.monotonic() - began) / WAY_SHARE)
        self._is_on_its_way = False

    def newest(self, plan_digest: str) -> Snapshot | None:
        """What the controller has of a plan."""
        try:
            found = ray.get(self._controller.kept_snapshot.remote())
        except RayError:  # there are checkpoints
            return None
        if found is None or found[0]["plan_digest"] != plan_digest:
            return None
        meta, data = found
        return Snapshot(meta, bytearray(data), "the memory of the head")
