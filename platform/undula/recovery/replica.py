"""Replicas of a run's snapshots in the memory of its controller, needed when a node is lost whose state no other node holds."""

import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from undula.recovery.snapshot import Snapshot, packed, parsed
from undula.recovery.worker_state import HeldState

PUT_SHARE = 0.005
"""Maximum share of the time that is spent on passing replicas to Ray, which takes memory bandwidth from training."""
WAY_SHARE = 0.05
"""Maximum share of the time during which a replica is being sent over the network."""


class ReplicaClient:
    """Client of the controller's replica store, which sends the snapshots of this rank and fetches stored ones.

    Args:
        controller: Handle of the controller's actor, which has the methods `store_replica` and `stored_replicas` of ElasticController.
        rank: Rank of this process.
        is_elsewhere: Whether this process runs on another node than the controller.
        shares_node: Whether all ranks run on the node of this process.
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
        """Return whether snapshots need replicas and the next one may be sent now.

        Args:
            is_whole: Whether every rank holds the whole state.
        """
        needed = not is_whole or (self._shares_node and self._is_elsewhere)
        return needed and self._has_room and not self._is_on_its_way and time.monotonic() >= self._next

    def send(self, meta: bytes, data: memoryview) -> None:
        """Start sending a snapshot. Its bytes are copied before this method returns."""
        began = time.monotonic()
        answer = self._store(meta, np.frombuffer(data, np.uint8))
        self._next = began + (time.monotonic() - began) / PUT_SHARE
        self._is_on_its_way = True
        answer.future().add_done_callback(lambda answer: self._arrived(answer, began))

    def give(self, held: HeldState) -> bool:
        """Send the part of the state that this process holds, and wait until it has arrived, because this node may be removed.

        Returns:
            Whether the controller has stored it; False if it has no room or does not answer.
        """
        meta, data = packed(held.plan_digest, held.age, held.state, held.rows)
        try:
            return bool(ray.get(self._store(meta, np.frombuffer(data, np.uint8))))
        except RayError:
            return False

    def fetch(self, rank: int, world_size: int) -> list[Snapshot]:
        """Fetch a rank's share of the snapshots that the controller holds."""
        try:
            found = ray.get(self._controller.stored_replicas.remote(rank, world_size))
        except RayError:  # the run can still resume from a checkpoint
            return []
        return [parsed(meta, bytearray(data), "the memory of the head") for meta, data in found]

    def _store(self, meta: bytes, data: "np.ndarray[Any, Any]") -> Any:
        return self._controller.store_replica.remote(self._rank, meta, ray.put(data))

    def _arrived(self, answer: "Future[bool]", began: float) -> None:
        self._has_room = self._has_room and answer.exception() is None and answer.result()
        self._next = max(self._next, began + (time.monotonic() - began) / WAY_SHARE)
        self._is_on_its_way = False
