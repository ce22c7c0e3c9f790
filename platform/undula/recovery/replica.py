"""Replicas of a run's snapshots in the memory of its controller, for when nodes go whose state no other node has."""

import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from undula.recovery.snapshot import Snapshot, packed, parsed
from undula.recovery.worker_state import HeldState

PUT_SHARE = 0.005
"""Largest share of the time for handing a replica to Ray, which takes memory bandwidth from the training."""
WAY_SHARE = 0.05
"""Largest share of the time during which a replica is on its way over the network."""


class ReplicaClient:
    """Sends snapshots to the controller, and gets them back.

    Args:
        controller: the actor, with ElasticController's `store_replica` and `stored_replicas`.
        rank: of this process.
        is_elsewhere: whether this process is on another node than the controller.
        shares_node: whether all ranks are on the node of this process.
    """

    def __init__(self, controller: Any, rank: int, is_elsewhere: bool, shares_node: bool):
        self._controller = controller
        self._rank = rank
        self._is_elsewhere = is_elsewhere
        self._shares_node = shares_node
        self._has_room = True
        self._is_on_its_way = False
        self._next = 0.0

    def is_due(self, is_whole: bool) -> bool:
        """Whether a snapshot needs a replica, and it is time for one.

        Args:
            is_whole: whether each rank has all of the state.
        """
        needed = not is_whole or (self._shares_node and self._is_elsewhere)
        return needed and self._has_room and not self._is_on_its_way and time.monotonic() >= self._next

    def send(self, meta: bytes, data: memoryview) -> None:
        """Begin to send a snapshot; the bytes are copied before this returns."""
        began = time.monotonic()
        answer = self._store(meta, np.frombuffer(data, np.uint8))
        self._next = began + (time.monotonic() - began) / PUT_SHARE
        self._is_on_its_way = True
        answer.future().add_done_callback(lambda answer: self._arrived(answer, began))

    def give(self, held: HeldState) -> bool:
        """Send what this process has of the state, and wait for it to arrive: its node may go. False where there is no room for it."""
        meta, data = packed(held.plan_digest, held.age, held.state, held.rows)
        try:
            return bool(ray.get(self._store(meta, np.frombuffer(data, np.uint8))))
        except RayError:
            return False

    def fetch(self, rank: int, world_size: int) -> list[Snapshot]:
        """A rank's share of what the controller has."""
        try:
            found = ray.get(self._controller.stored_replicas.remote(rank, world_size))
        except RayError:  # there are checkpoints
            return []
        return [parsed(meta, bytearray(data), "the memory of the head") for meta, data in found]

    def _store(self, meta: bytes, data: "np.ndarray[Any, Any]") -> Any:
        return self._controller.store_replica.remote(self._rank, meta, ray.put(data))

    def _arrived(self, answer: "Future[bool]", began: float) -> None:
        self._has_room = self._has_room and answer.exception() is None and answer.result()
        self._next = max(self._next, began + (time.monotonic() - began) / WAY_SHARE)
        self._is_on_its_way = False
