"""Replicas of a run's snapshots in the memory of its controller, needed when a node is lost whose state no other node holds.

While a replica is on its way, Ray holds up to two more copies of its bytes: one in the object store of the sender's node, and one in that
of the head until the controller has copied it. A refused replica is not moved to the head.
"""

import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from undula.recovery.node_memory import Send
from undula.recovery.snapshot import Snapshot, parsed

PUT_SHARE = 0.005
"""Maximum share of the time that is spent on passing replicas to Ray, which takes memory bandwidth from training."""
WAY_SHARE = 0.05
"""Maximum share of the time during which a replica is being sent over the network."""


class ReplicaClient:
    """Client of the controller's replica store, which sends the snapshots of this rank and fetches stored ones.

    Args:
        controller: Handle of the controller's actor, which has the methods `store_replica` and `stored_replicas` of ElasticController.
        rank: Rank of this process.
        world_size: Number of ranks.
        is_elsewhere: Whether this process runs on another node than the controller.
        shares_node: Whether all ranks run on the node of this process.
    """

    def __init__(self, controller: Any, rank: int, world_size: int, is_elsewhere: bool, shares_node: bool):
        self._controller = controller
        self._rank, self._world_size = rank, world_size
        self._is_elsewhere = is_elsewhere
        self._shares_node = shares_node
        self._has_room = True
        self._began = 0.0
        self._next = 0.0
        self.is_on_its_way = False
        """Whether a replica of this rank is being sent."""

    def is_due(self, is_whole: bool) -> bool:
        """Return whether snapshots need replicas and the next one may be sent now.

        Args:
            is_whole: Whether every rank holds the whole state.
        """
        needed = not is_whole or (self._shares_node and self._is_elsewhere)
        return needed and self._has_room and not self.is_on_its_way and time.monotonic() >= self._next

    def sender(self, state_bytes: int) -> Send:
        """Return a callback that starts sending one snapshot. The snapshot counts as being on its way from now on.

        The callback copies the bytes before it returns.

        Args:
            state_bytes: Number of bytes that all ranks send of this state.
        """
        self.is_on_its_way, self._began = True, time.monotonic()
        return partial(self._send, state_bytes)

    def still_on_its_way(self) -> None:
        """Put off the next replica, because that of another rank has not arrived yet."""
        now = time.monotonic()
        self._next = max(self._next, now + (now - self._began) / WAY_SHARE)

    def fetch(self, rank: int, world_size: int) -> list[Snapshot]:
        """Fetch a rank's share of the snapshots that the controller holds."""
        try:
            replicas = ray.get(self._controller.stored_replicas.remote(rank, world_size))
        except RayError:  # the run can still resume from a checkpoint
            return []
        return [parsed(meta, bytearray(data), "the memory of the head") for meta, data in replicas]

    def _send(self, state_bytes: int, meta: bytes, data: memoryview) -> None:
        began = time.monotonic()
        try:
            answer = self._store(meta, np.frombuffer(data, np.uint8), state_bytes)
        except RayError:  # the object store of this node is full; there will be another replica
            self.still_on_its_way()
            self.is_on_its_way = False
            return
        self._next = began + (time.monotonic() - began) / PUT_SHARE
        answer.future().add_done_callback(self._arrived)

    def _store(self, meta: bytes, data: "np.ndarray[Any, Any]", state_bytes: int) -> Any:
        # Ray would move a reference that is an argument of its own to the head before the controller can refuse it.
        return self._controller.store_replica.remote(self._rank, self._world_size, meta, [ray.put(data)], state_bytes)

    def _arrived(self, answer: "Future[bool]") -> None:
        self._has_room = self._has_room and answer.exception() is None and answer.result()
        self.still_on_its_way()
        self.is_on_its_way = False
