"""Carries the policy's decisions out on Ray Train: its controller, and the scaling policy that stands between the two."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.controller.state import RunningState
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.preemption import PreemptionInfo

from undula.elastic.actor import ElasticStatus
from undula.elastic.events import ControllerEvents, EventQueue, EventSink, log_event
from undula.elastic.failures import RetryUnlessBug
from undula.elastic.group import PooledState, WorkerGroups, actor_id
from undula.elastic.policy import LEAVE_S, Decision, Growth, Hold, Resize, Save, View, decide, hang_limit_s, lost_ranks
from undula.elastic.pool import WorkerPool
from undula.run.handover import ProgressView, Request
from undula.state.ledger import Event
from undula.state.snapshot import parsed

POLL_INTERVAL_S = 0.25
FAST_POLL_S = 0.02
FAST_FOR_S = 1.0
"""After a worker has called, and while a group ends."""
ANSWER_S = 0.05
"""A poll takes; a later answer is the next one's."""
TELL_INTERVAL_S = 30.0
START_S = 15.0
"""In which workers that are being started are expected."""
FIRST_START_PATIENCE_S = 30.0
"""How long a job with fewer workers than there could be waits at its start for those that are being started."""


@dataclass
class PoolPolicy(ScalingPolicy):
    """What Ray's controller asks; it answers from the pool and by `undula.elastic.policy`."""

    scaling_config: ScalingConfig
    grow: str
    hang_limit_s: float | None
    on_event: EventSink = log_event
    pool: WorkerPool | None = None
    _leaving: Decision | None = None
    _has_run: bool = False
    _began: float = field(default_factory=time.monotonic)
    _told: float = float("-inf")
    _told_ready: int = 0
    _waits_since: float | None = None
    _lost_since: float | None = None
    _changes: int = 0
    _pause_began: float | None = None
    _pauses: list[float] = field(default_factory=list)
    _last: dict[int, ProgressView] = field(default_factory=dict)
    _reached: int = -1
    """The step that the group before had come to."""
    _longest_step_s: float = 0.0
    _is_run: bool = False
    _noticed: set[str] = field(default_factory=set)
    _saved: float | None = None
    _woken: float | None = None

    def __post_init__(self) -> None:
        super().__init__(self.scaling_config)

    @property
    def is_leaving(self) -> bool:
        """Whether the group was asked to end."""
        return self._leaving is not None

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        pool = self._pool()
        self._maybe_send_resource_request()  # type: ignore[no-untyped-call]
        pool.tick()
        self._leaving = None
        ready, low = len(pool.ready()), self.scaling_config.min_workers
        is_filling = not self._has_run and pool.preparing and time.monotonic() - self._began < FIRST_START_PATIENCE_S
        if ready >= low and not (is_filling and ready < self.scaling_config.max_workers) and not self._awaits_state():
            self._waits_since = None
            return self._resize(min(ready, self.scaling_config.max_workers))
        self._pause_began = None  # what takes time now is the cluster, and no resize
        if pool.failure and not pool.preparing and not self._has_run:
            raise pool.failure
        self._tell_waiting(ready, low, pool.preparing)
        return NoopDecision()

    def _awaits_state(self) -> bool:
        """Whether all who had the state are lost, and a new worker on a node whose memory may have it is worth a while.

        The answer of one whose node will go is worth all the time until then.
        """
        pool = self._pool()
        holders = pool.trained_on & {node.id for node in pool.nodes.values() if node.deadline is None}
        is_there = any(worker.has_trained or worker.node in holders for worker in pool.ready())
        if pool.is_rescuing:
            return True
        if is_there or not holders:
            self._lost_since = None
            return False
        self._lost_since = self._lost_since or time.monotonic()
        return time.monotonic() - self._lost_since < START_S

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        pool = self._pool()
        self._maybe_send_resource_request()  # type: ignore[no-untyped-call]
        pool.tick()
        self._has_run = True
        statuses = _elastic(worker_group_status)
        if self._is_stuck(worker_group_state, statuses):
            return self._resize(len(statuses))
        self._tell_notices(worker_group_state)
        if self._leaving:
            if not all(status.has_left for status in statuses):
                return NoopDecision()
            wanted = (
                len(self._leaving.workers) if isinstance(self._leaving, Resize) else self.scaling_config.min_workers
            )
            self._leaving = None
            return self._resize(wanted)
        decision = decide(self._view(), self.scaling_config.min_workers, self.scaling_config.max_workers, self.grow)
        is_starting = self._is_run and (len(self._last) < len(statuses) or min(r.step for r in self._last.values()) < 0)
        if isinstance(decision, Hold) or is_starting:
            return NoopDecision()
        self._tell(decision, len(statuses))
        if not self._is_run:  # no Run that could end at a step boundary
            return NoopDecision() if isinstance(decision, Save) else self._resize(len(decision.workers))
        if isinstance(decision, Save):
            self._saved = pool.newest_notice
            request = Request(decision.ends, saves=True)
        else:
            group = {actor_id(worker) for worker in worker_group_state.workers}
            request = Request(leaves=True, gives=not group <= set(decision.workers))
        self._leaving = decision if request.leaves else None
        for worker in worker_group_state.workers:
            worker.actor.ask.remote(request)
        return NoopDecision()

    def _resize(self, num_workers: int) -> ResizeDecision:
        self._reached = max([self._reached, *(rank.step for rank in self._last.values())])
        self._last.clear()
        self._woken = None
        if self._has_run:
            self._changes += 1
            self._pause_began = self._pause_began or time.monotonic()
        return ResizeDecision(num_workers, self.scaling_config._resources_per_worker_not_none)

    def _view(self) -> View:
        pool = self._pool()
        deadlines = {node.id: node.deadline for node in pool.nodes.values() if node.deadline is not None}
        lived = time.monotonic() - self._began
        interval = (Growth.interval_s + lived) / max(self._changes, 1)
        cost = sum(self._pauses[-5:]) / len(self._pauses[-5:]) if self._pauses else Growth.cost_s
        return View(
            now=time.time(),
            seats=pool.seats(),
            deadlines=deadlines,
            noticed=pool.newest_notice,
            growth=Growth(interval, cost),
            is_saved=self._saved == pool.newest_notice,
            step_s=self._longest_step_s,
        )

    def _is_stuck(self, state: WorkerGroupState, statuses: list[ElasticStatus]) -> bool:
        """Learn where the ranks stand, and end the process of one that makes no step; whether all wait for each other instead."""
        for rank, status in enumerate(statuses):
            if status.progress:
                self._is_run = True
                self._last[rank] = status.progress
                self._pool().worker_bytes = status.resident_bytes
        self._last = {rank: self._last[rank] for rank in range(len(statuses)) if rank in self._last}
        self._tell_lost([rank.began for rank in self._last.values() if rank.began >= 0])
        if self._pause_began and any(rank.longest_step_s for rank in self._last.values()):
            self._pauses.append(time.monotonic() - self._pause_began)
            self._pause_began = None
        ranks = [self._last.get(rank) for rank in range(len(statuses))]
        assert isinstance(state, PooledState)
        silent_s = state.group.silent_s()
        # A group that has just begun is measured by the steps of the one before.
        self._longest_step_s = max((rank.longest_step_s for rank in ranks if rank), default=0.0) or self._longest_step_s
        limit = hang_limit_s(self._longest_step_s, self.hang_limit_s)
        lost = lost_ranks(ranks, silent_s, limit)
        if len(lost) == len(ranks) and max(silent_s) <= limit and len(ranks) > 1:
            return self._wake(state, limit)
        for rank in lost:
            worker = state.workers[rank]
            if actor_id(worker) not in self._pool().workers:
                continue  # it was ended, and Ray has not noticed yet
            where = f"rank {rank} (process {worker.metadata.pid} on {worker.metadata.node_ip})"
            self.on_event(
                Event("crash", f"{where} made no step for {limit:.1f} s: treated as lost", data={"rank": rank})
            )
            self._pool().drop(actor_id(worker))
        return False

    def _wake(self, state: WorkerGroupState, limit_s: float) -> bool:
        """Break the collective in which all ranks wait for each other; whether that was tried before, and they wait still."""
        if self._woken is not None:
            return time.monotonic() - self._woken > limit_s
        self._woken = time.monotonic()
        self.on_event(Event("crash", f"all ranks have waited for each other for {limit_s:.1f} s: meeting anew"))
        for worker in state.workers:
            worker.actor.break_collectives.remote()
        return False

    def _tell(self, decision: Resize | Save, current: int) -> None:
        if isinstance(decision, Save):
            then = "waiting" if decision.ends else f"training on until {LEAVE_S:.0f} s before they go"
            self.on_event(Event("notice", f"saving, then {then}: {decision.reason}"))
            return
        message = f"resizing from {current} to {len(decision.workers)} workers: {decision.reason}"
        self.on_event(Event("resize", message, data={"from": current, "to": len(decision.workers)}))

    def _tell_notices(self, state: WorkerGroupState) -> None:
        """Tell of nodes that will go; a train function that is no Run's learns of it by ray.train.get_preemption_info()."""
        pool = self._pool()
        ranks: dict[str, list[int]] = {}
        for rank, worker in enumerate(state.workers):
            ranks.setdefault(worker.metadata.node_id, []).append(rank)
        new = [node for node in pool.notices if node in ranks and node not in self._noticed]
        if not new:
            return
        self._noticed |= set(new)
        for node in new:
            seconds = (pool.nodes[node].deadline or 0.0) - time.time()
            when = f"in {max(seconds, 0):.0f} s" if seconds < float("inf") else "soon"
            who = f"rank{'s' if len(ranks[node]) > 1 else ''} {', '.join(map(str, ranks[node]))}"
            self.on_event(
                Event(
                    "notice",
                    f"node {node[:8]} with {who} will go {when}",
                    data={"node": node, "deadline": pool.nodes[node].deadline if seconds < float("inf") else None},
                )
            )
        deadline = min(pool.nodes[node].deadline or float("inf") for node in new)
        deadline_ms = int(deadline * 1e3) if deadline < float("inf") else None
        info = PreemptionInfo(deadline_ms, {node: ranks[node] for node in pool.notices if node in ranks})
        for worker in state.workers:
            worker.actor.mark_preempt.remote(info)

    def _tell_lost(self, begun: list[int]) -> None:
        """Tell of steps that were done, and that the group does again."""
        if not begun:
            return
        lost, self._reached = self._reached - begun[0], -1
        if lost > 0:
            words = f"{lost} step{'s are' if lost > 1 else ' is'} done again"
            self.on_event(Event("lost", words, begun[0], {"steps": lost}))

    def _tell_waiting(self, ready: int, low: int, preparing: int) -> None:
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        is_early = now - self._waits_since < (START_S if preparing else 1.0)  # workers that start are no news
        if is_early or (now - self._told < TELL_INTERVAL_S and ready == self._told_ready):
            return
        self._told, self._told_ready = now, ready
        need = ", ".join(f"{amount:g} {name}" for name, amount in self._pool().resources.items() if amount)
        missing = f"{low - ready} more worker{'s' if low - ready > 1 else ''} of {need}"
        what = (
            missing if ready < low else "a node that may have the run's state" if self._lost_since else "more workers"
        )
        words = f"waiting for {what}: {ready} ready, {preparing} starting, at least {low} needed"
        self.on_event(Event("waiting", words, data={"ready": ready}))

    def _pool(self) -> WorkerPool:
        assert self.pool is not None
        return self.pool

    def _get_num_workers_for_resource_request(self) -> int:
        return int(self.scaling_config.max_workers)


class ElasticController(TrainController):
    """Ray Train's controller with a pool of workers, which polls when there is something to see."""

    def __init__(
        self,
        *,
        scaling_policy: PoolPolicy,
        prepare: Callable[[], None] | None,
        on_event: EventSink,
        callbacks: list[Any],
        **arguments: Any,
    ):
        config, context = scaling_policy.scaling_config, arguments["train_run_context"]
        self._events = scaling_policy.on_event = EventQueue(on_event)
        self._pool = scaling_policy.pool = WorkerPool(
            train_fn_ref=arguments["train_fn_ref"],
            prepare=prepare,
            resources=config._resources_per_worker_not_none,
            runtime_env=WorkerGroup._get_worker_runtime_env(context.run_config.worker_runtime_env),
            high=config.max_workers,
            on_event=self._events,
        )
        self.worker_group_cls = WorkerGroups(self._pool)  # type: ignore[assignment]
        self._called = asyncio.Event()
        self._fast_until = float("-inf")
        self._elastic_policy = scaling_policy
        self._retries: RetryUnlessBug = arguments["failure_policy"]
        told = [*callbacks, ControllerEvents(self._events)]
        super().__init__(scaling_policy=scaling_policy, callbacks=told, **arguments)

    async def wake(self) -> None:
        """A worker has something to tell."""
        self._fast_until = time.monotonic() + FAST_FOR_S
        self._called.set()

    async def keep_snapshot(self, rank: int, meta: bytes, data: np.ndarray[Any, Any]) -> bool:
        """Keep a copy of a rank's snapshot; False where there is no room for it."""
        if data.nbytes > self._pool.keeper.room():
            return False
        self._pool.keeper.keep(f"rank {rank}", parsed(meta, await asyncio.to_thread(bytearray, data)))
        return True

    async def kept_snapshots(self, rank: int, world_size: int) -> list[tuple[bytes, np.ndarray[Any, Any]]]:
        """What one of so many ranks is to fetch of what was kept, or given by workers whose node was to go."""
        found = self._pool.keeper.share(rank, world_size)
        return [(snapshot.as_bytes(), np.frombuffer(snapshot.load_bytes(), np.uint8)) for snapshot in found]

    async def _poll_workers(self) -> WorkerGroupPollStatus:
        await self._pause()
        assert self._worker_group is not None
        status = self._worker_group.poll_status(timeout=ANSWER_S)
        ranks = [each.progress for each in _elastic(status) if each.progress]
        self._retries.has_stepped |= any(rank.longest_step_s > 0 for rank in ranks)
        return status

    async def _step(self) -> Any:
        if self._worker_group is None and not isinstance(self.get_state(), RunningState):
            # Ray's own loop would not let anything else run while it waits for nodes.
            await asyncio.sleep(max(self._retries.take_pause_s(), FAST_POLL_S))
        return await super()._step()

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


def _elastic(status: WorkerGroupPollStatus) -> list[ElasticStatus]:
    """By rank; a rank that has not answered has told nothing."""
    statuses = status.worker_statuses.values()
    return [each if isinstance(each, ElasticStatus) else ElasticStatus(**vars(each)) for each in statuses]
