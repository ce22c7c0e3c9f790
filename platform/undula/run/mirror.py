"""A copy of a run's newest snapshot in the memory of its controller, for when all ranks are on one node and that one goes."""

import time
from collections.abc import Mapping
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
        self._answer: Any = None
        self._began = 0.0
        self._next = 0.0

    def send(self, meta: Mapping[str, Any], data: memoryview) -> None:
        """Begin to send a snapshot, where it is time for one; the bytes are copied before this returns."""
        now = time.monotonic()
        if self._answer is not None:
            done, _ = ray.wait([self._answer], timeout=0)
            if not done:
                return
            self._next = max(self._next, now + (now - self._began) / WAY_SHARE)
            self._sends = self._sends and _is_yes(done[0])
            self._answer = None
        if not self._sends or now < self._next:
            return
        self._began = now
        copy = ray.put(np.frombuffer(data, np.uint8))
        self._answer = self._controller.keep_snapshot.remote(dict(meta), copy)
        self._next = time.monotonic() + (time.monotonic() - now) / PUT_SHARE

    def newest(self, plan_digest: str) -> Snapshot | None:
        """What the controller has of a plan."""
        found = ray.get(self._controller.kept_snapshot.remote())
        if found is None or found[0]["plan_digest"] != plan_digest:
            return None
        meta, data = found
        return Snapshot(meta, bytearray(data), "the memory of the head")


def _is_yes(answer: Any) -> bool:
    """Whether the controller had room."""
    try:
        return bool(ray.get(answer))
    except RayError:
        return False
