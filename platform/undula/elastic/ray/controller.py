"""Ray Train's controller, extended to keep workers between groups and to poll them as soon as one of them requests it."""

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from ray import ObjectRef
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.controller.state import (
    InitializingState,
    ReschedulingState,
    RestartingState,
    RunningState,
    ShuttingDownState,
)
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus
from ray.train.v2.api.config import ScalingConfig

from undula.elastic.ray.events import ControllerEvents, EventQueue
from undula.elastic.ray.failures import RetryUnlessBug, lacks_cause
from undula.elastic.ray.group import ElasticWorkerGroup, WorkerGroups
from undula.elastic.ray.pool import WorkerPool
from undula.elastic.ray.scaling import PoolPolicy, elastic_statuses
from undula.recovery.replica_store import Replica
from undula.state.events import WarningEvent

POLL_INTERVAL_S = 0.25
"""Seconds between two polls of the workers."""
FAST_POLL_S = 0.02
"""Seconds between two polls after a worker has called `wake`, and while a group ends."""
FAST_FOR_S = 1.0
"""Seconds for which polling is fast after such a call."""
POLL_TIMEOUT_S = 0.05
"""Maximum seconds for which a poll waits for answers. The next poll collects the answers that arrive later."""
WAITING_STATES = (InitializingState, RestartingState, ReschedulingState)
"""States in which the controller waits until a group can start."""
CAUSE_LIMIT_S = 0.15
"""Maximum seconds to wait for the failure that broke the collectives of other ranks, whose answers can arrive earlier."""


class ElasticController(TrainController):
    """Ray Train's controller with a pool of workers. It polls the workers as soon as one of them calls `wake`.

    Args:
        scaling_config: Ray Train's configuration of the workers.
        grow, hang_limit_s: Values of these fields of WorkersSpec.
        pool: Pool of the run's workers.
        callbacks, arguments: Arguments that Ray Train passes to its own controller.
    """

    def __init__(
        self,
        *,
        scaling_config: ScalingConfig,
        grow: str,
        hang_limit_s: float | None,
        pool: WorkerPool,
        callbacks: list[Any],
        **arguments: Any,
    ):
        self._events = EventQueue(pool.on_event)
        self._pool = replace(pool, on_event=self._events, fleet=replace(pool.fleet, on_event=self._events))
        self.worker_group_cls = WorkerGroups(self._pool)  # type: ignore[assignment]
        self._called = asyncio.Event()
        self._fast_until = float("-inf")
        self._retries: RetryUnlessBug = arguments["failure_policy"]
        needs = scaling_config._resources_per_worker_not_none
        events = ControllerEvents(self._events, needs, waits_for_storage=lambda: self._retries.waits_for_storage)
        report = events.with_ready_workers(self._pool.ready)
        self._elastic_policy = PoolPolicy(scaling_config, grow, hang_limit_s, self._pool, report)
        self._has_reported_refusal = False
        super().__init__(scaling_policy=self._elastic_policy, callbacks=[*callbacks, events], **arguments)
        gc.freeze()  # a garbage collection that looks through all imported modules would hold up calls

    async def wake(self) -> None:
        """Poll the workers at once. A worker calls this method when its state has changed."""
        self._fast_until = time.monotonic() + FAST_FOR_S
        self._called.set()

    async def store_replica(
        self,
        rank: int,
        world_size: int,
        meta: bytes,
        data: Sequence["ObjectRef[np.ndarray[Any, Any]]"],
        state_bytes: int,
    ) -> bool:
        """Store a replica of a rank's snapshot. A refused one is not moved to this node.

        Args:
            rank: Rank of the sender.
            world_size: Number of ranks, which all send their parts.
            meta: Meta of the snapshot.
            data: Reference to an array of its bytes, in a sequence of one element.
            state_bytes: Size in bytes of the replicas of all ranks.

        Returns:
            False if there is no room for the replicas of all ranks.
        """
        # With thousands of tensors, a description takes long enough to hold up other calls.
        replicas, described = self._pool.replicas, await asyncio.to_thread(Replica.of, meta, bytearray())
        if described.age == replicas.newest_whole:
            return True
        if not replicas.admits(described.age, state_bytes):
            if described.age == replicas.refused and not self._has_reported_refusal:
                self._has_reported_refusal = True
                self._events(
                    WarningEvent("no_replicas", _refusal(state_bytes, replicas.budget()), step=described.age[1])
                )
            return False
        received = await data[0]
        replica = replace(described, data=await asyncio.to_thread(bytearray, received))
        return replicas.keep(f"rank {rank}", replica, world_size)

    async def stored_replicas(self, rank: int, world_size: int) -> list[tuple[bytes, np.ndarray[Any, Any]]]:
        """Return the share of the replicas that one of `world_size` ranks fetches. Together, the ranks fetch all replicas."""
        shared = self._pool.replicas.share(rank, world_size)
        return [(replica.meta, np.frombuffer(replica.data, np.uint8)) for replica in shared]

    async def leavers(self) -> dict[str, Any]:
        """Return the handles of workers that are in no group but may hold the newest state, by id. Ranks that start get parts from them."""
        return {worker.id: worker.actor for worker in self._pool.leavers()}

    async def _poll_workers(self) -> WorkerGroupPollStatus:
        await self._pause()
        assert self._worker_group is not None
        status = self._worker_group.poll_status(timeout=POLL_TIMEOUT_S)
        deadline = time.monotonic() + CAUSE_LIMIT_S
        while lacks_cause(status.errors, len(status.worker_statuses)) and time.monotonic() < deadline:
            await asyncio.sleep(FAST_POLL_S)
            status = self._worker_group.poll_status(timeout=POLL_TIMEOUT_S)
        ranks = [rank_status.progress for rank_status in elastic_statuses(status) if rank_status.progress]
        for rank in ranks:
            if rank.longest_step_s > 0:
                self._retries.observe(rank.step)
        return status

    async def _step(self) -> Any:
        self._pool.is_ending = isinstance(self.get_state(), ShuttingDownState)
        if not isinstance(self.get_state(), RunningState):
            has_ended_now = await self._let_leave()
            pause_s = self._retries.take_pause_s()
            if pause_s or (isinstance(self.get_state(), WAITING_STATES) and not has_ended_now):
                # Ray's own loop would block the actor while it waits for nodes.
                await asyncio.sleep(max(pause_s, FAST_POLL_S))
        return await super()._step()

    async def _let_leave(self) -> bool:
        """Let the workers leave the group that ends. This actor serves calls meanwhile, because they may have to copy large states.

        Returns:
            Whether there was a group to leave.
        """
        group = self._worker_group
        is_group = isinstance(group, ElasticWorkerGroup) and group.ask_to_leave()
        while not self._pool.await_left(FAST_POLL_S):
            self._pool.tick()
            await asyncio.sleep(0)
        return is_group

    async def _shutdown(self) -> Any:
        result = await super()._shutdown()
        self._pool.close()
        self._events.close()
        return result

    async def _pause(self) -> None:
        is_fast = time.monotonic() < self._fast_until or self._elastic_policy.is_leaving
        try:
            await asyncio.wait_for(self._called.wait(), FAST_POLL_S if is_fast else POLL_INTERVAL_S)
        except TimeoutError:
            return
        self._called.clear()


def _refusal(state_bytes: int, budget: int) -> str:
    need = f"two copies of {state_bytes / 2**20:.0f} MiB"
    return f"{need} would take more than the {budget / 2**20:.0f} MiB that are half of its free memory"
