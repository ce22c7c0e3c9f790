"""Scaling policy of Ray Train's controller. It applies `undula.elastic.pure.policy` to the state of the worker pool."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeGuard

from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.preemption import PreemptionInfo

from undula.elastic.pure.deadlock import CollectiveWait
from undula.elastic.pure.policy import (
    LEAVE_S,
    Decision,
    Growth,
    Hold,
    Resize,
    Save,
    View,
    decide,
    hang_limit_s,
    limiting_step_s,
    lost_ranks,
    patience_s,
    reason_to_stay,
    silent_ranks,
)
from undula.elastic.pure.sharing import WaitingRun
from undula.elastic.ray.actor import ElasticStatus
from undula.elastic.ray.autoscaler import AutoscalerRequest
from undula.elastic.ray.events import EventSink
from undula.elastic.ray.group import PooledState, actor_id
from undula.elastic.ray.group_view import GroupView, Wait
from undula.elastic.ray.pool import WorkerPool
from undula.elastic.ray.waiting_runs import WorkerSharing
from undula.recovery.worker_state import Request
from undula.state.events import (
    CrashEvent,
    LostEvent,
    NoticeEvent,
    ResizeEvent,
    SaveEvent,
    StayEvent,
    StayReason,
    WaitedFor,
    WaitingEvent,
)

RUN_NAME = "ray"
"""Name that Ray Train gets for each run of a job, whose own name is that of its folder."""
REPORT_INTERVAL_S = 30.0
"""Seconds between two events about the same wait, as long as the number of ready workers does not change."""
START_S = 15.0
"""Seconds within which workers that start are expected to be ready."""
STAY_S = 5.0
"""Seconds for which a group has fewer workers than it may have before this is reported."""
LOST_NODE_S = 3.0
"""Seconds to wait until a worker starts on a node on which one was lost with its part of the state."""
STATE_START_S = 60.0
"""Maximum seconds to wait for a worker that is starting on such a node. If the node itself is lost, Ray notices this earlier."""
FIRST_START_PATIENCE_S = 30.0
"""Maximum seconds for which a job that has its minimum of workers waits at its start for more workers that are starting."""


@dataclass
class PoolPolicy(ScalingPolicy):
    """Scaling policy that lets a group end at a step boundary before a resize. It decides by `undula.elastic.pure.policy`."""

    scaling_config: ScalingConfig
    grow: str
    hang_limit_s: float | None
    pool: WorkerPool
    on_event: EventSink
    _group: GroupView = field(default_factory=GroupView)
    _wait: Wait = field(default_factory=Wait)
    _began: float = field(default_factory=time.monotonic)
    _has_run: bool = False
    _is_run: bool = False
    """Whether the train function uses a Run, so that it can leave at a step boundary."""
    _reached: int = -1
    """Number of steps that the former group had committed; -1 once the next group has reported."""
    _longest_step_s: float = 0.0
    _limiting_step_s: float = 0.0
    """Duration of the step that the limit of a hang follows."""
    _was_hung: bool = False
    """Whether a rank of the run has counted as hung."""
    _changes: int = 0
    _pause_began: float | None = None
    _pauses: list[float] = field(default_factory=list)
    _noticed: set[str] = field(default_factory=set)
    _stays: set[StayReason] = field(default_factory=set)
    """Reasons that were reported for a group that is smaller than it may be."""
    _saved: float | None = None
    """Time of the notice for which a checkpoint was last requested; None before the first request."""
    _request: AutoscalerRequest | None = None

    def __post_init__(self) -> None:
        super().__init__(self.scaling_config)
        self._sharing = WorkerSharing(self.pool, self.on_event)
        self._name = ""

    @property
    def is_leaving(self) -> bool:
        """Whether the group has been asked to end."""
        return self._group.leaving is not None

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        pool = self.pool
        pool.tick()
        if pool.refusal and not self._has_run:
            raise pool.refusal
        self._send_resource_request()
        self._group.leaving = None
        ready, low = len(pool.ready()), self.scaling_config.min_workers
        is_filling = not self._has_run and pool.preparing and time.monotonic() - self._began < FIRST_START_PATIENCE_S
        if ready >= low and not (is_filling and ready < self.scaling_config.max_workers) and not self._needs_state():
            self._wait.since = None
            return self._resize(min(ready, self.scaling_config.max_workers))
        self._pause_began = None  # the cluster causes this wait, so it does not count as the pause of a resize
        if pool.failure and not pool.preparing and not self._has_run:
            raise pool.failure
        self._report_waiting(ready, low, pool.preparing, self._rivals(ready, low) if ready < low else ())
        return NoopDecision()

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        super().after_controller_start(train_run_context)
        config = train_run_context.run_config
        folder = PurePath(config.storage_path or "", config.name or "")
        self._name = folder.parent.name if folder.name == RUN_NAME else folder.name

    def _rivals(self, ready: int, low: int) -> tuple[str, ...]:
        """Return the names of other runs that wait for workers as well, and give them this run's if it is its turn."""
        if self._requester_id is None:
            return ()
        since = time.time() - (time.monotonic() - self._wait.since if self._wait.since else 0.0)
        resources = [name for name, amount in self.pool.resources.items() if amount]
        own = WaitingRun(
            self._requester_id, self._name, low, ready, since, bool(self.pool.trained_on), tuple(resources)
        )
        return self._sharing.waits(own)

    def _needs_state(self) -> bool:
        """Return whether to wait for the run's state before a group starts.

        If no ready worker holds the state, but the memory of a node that stays may hold it, the run waits up to START_S for a worker on
        such a node. If workers hold different parts, it waits for one on each node that may have the part of a lost one, but only for
        LOST_NODE_S if none is starting there, because the node itself may be lost. If a worker is exporting its state because its node
        will be removed, the run waits until the export has ended.
        """
        pool = self.pool
        staying = {node.id for node in pool.nodes.values() if node.deadline is None}
        holders, limit_s = pool.trained_on & staying, START_S
        is_held = any(worker.has_trained or worker.node in holders for worker in pool.ready())
        if pool.shares_state:
            holders = pool.lost_on & staying
            is_held = holders <= {worker.node for worker in pool.ready()}
            is_starting = any(worker.node in holders for worker in pool.workers.values() if not worker.metadata)
            limit_s = STATE_START_S if is_starting else LOST_NODE_S
        if pool.is_exporting:
            return True
        if is_held or not holders:
            self._wait.lost_since = None
            return False
        self._wait.lost_since = self._wait.lost_since or time.monotonic()
        return time.monotonic() - self._wait.lost_since < limit_s

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        pool = self.pool
        pool.tick()
        self._send_resource_request()
        self._has_run = True
        statuses = elastic_statuses(worker_group_status)
        self._update_measurements(statuses)
        self._end_deadlock(worker_group_state, [status.wait for status in statuses])
        if self._is_stuck(worker_group_state):
            return self._resize(len(statuses))
        self._report_notices(worker_group_state)
        low, high = self.scaling_config.min_workers, self.scaling_config.max_workers
        view = self._view()
        decision = decide(view, low, high, self.grow)
        if leaving := self._group.leaving:
            if all(status.has_left for status in statuses):
                return self._resize(len(leaving.workers) if isinstance(leaving, Resize) else low)
            if _is_more_urgent(decision, leaving):  # a notice has come while the ranks wait for a checkpoint
                self._request_from_ranks(decision, worker_group_state)
            return NoopDecision()
        has_begun = self._group.is_stepping(len(statuses)) if self._is_run else True
        if isinstance(decision, Hold) or not has_begun:
            self._report_stay(view, high, has_begun)
            return NoopDecision()
        self._report_decision(decision, len(statuses))
        if not self._is_run:  # a train function without a Run cannot save or end at a step boundary
            return NoopDecision() if isinstance(decision, Save) else self._resize(len(decision.workers))
        self._request_from_ranks(decision, worker_group_state)
        return NoopDecision()

    def _request_from_ranks(self, decision: Resize | Save, state: WorkerGroupState) -> None:
        """Ask all ranks to save or to leave the group at their next step boundary."""
        if isinstance(decision, Save):
            self._saved = self.pool.newest_notice
            request = Request(decision.ends, saves=True)
        else:
            request = Request(leaves=True, until=decision.until)
        self._group.leaving = decision if request.leaves else None
        for worker in state.workers:
            worker.actor.set_request.remote(request)

    def _resize(self, num_workers: int) -> ResizeDecision:
        self._reached = max([self._reached, *(rank.step for rank in self._group.last.values())])
        self._group, self._wait = GroupView(), Wait()
        self._stays.discard("pause")
        self._sharing.ends()
        self.pool.fleet.pace.pause()
        if self._has_run:
            self._changes += 1
            self._pause_began = self._pause_began or time.monotonic()
        return ResizeDecision(num_workers, self.scaling_config._resources_per_worker_not_none)

    def _view(self) -> View:
        pool = self.pool
        deadlines = {node.id: node.deadline for node in pool.nodes.values() if node.deadline is not None}
        lived = time.monotonic() - self._began
        interval = (Growth.interval_s + lived) / max(self._changes, 1)
        cost = sum(self._pauses[-5:]) / len(self._pauses[-5:]) if self._pauses else Growth.cost_s
        return View(
            now=time.time(),
            slots=pool.worker_slots(),
            deadlines=deadlines,
            noticed=pool.newest_notice,
            growth=Growth(interval, cost, max(self._changes, 1)),
            is_saved=self._saved == pool.newest_notice,
            step_s=self._longest_step_s,
        )

    def _update_measurements(self, statuses: list[ElasticStatus]) -> None:
        """Update the progress of the group, and the measurements on which decisions are based."""
        for rank, status in enumerate(statuses):
            if status.progress:
                self._is_run = True
                self._group.last[rank] = status.progress
                self.pool.worker_bytes = status.resident_bytes
                self.pool.shares_state |= (
                    status.shares_state
                )  # which a new process does not know before it has restored
        ranks = self._group.last.values()
        self._report_lost_steps([rank.began for rank in ranks if rank.began >= 0])
        if len(ranks) == len(statuses) and all(rank.step > rank.began >= 0 for rank in ranks):
            self.pool.restored()
        if self._pause_began and any(rank.longest_step_s for rank in ranks):
            self._pauses.append(time.monotonic() - self._pause_began)
            self._pause_began = None
        self._longest_step_s = limiting_step_s(ranks, self._longest_step_s, was_hung=False)
        self._limiting_step_s = limiting_step_s(ranks, self._limiting_step_s, self._was_hung)
        if self.grow == "never":  # more workers would be idle
            self.pool.fleet.size = max(len(statuses), self.scaling_config.min_workers)
        if self._group.is_stepping(len(statuses)):
            self.pool.fleet.pace.observe(max(rank.step for rank in ranks), len(statuses), time.time())

    def _end_deadlock(self, state: WorkerGroupState, waits: Sequence[CollectiveWait | None]) -> None:
        """End the run if its ranks wait for each other in different collectives of the script, as those of the next group would."""
        if self._group.broken_at is None and (problem := self._group.deadlock(waits, time.monotonic())):
            self._group.broken_at = time.monotonic()
            assert isinstance(state, PooledState)
            for worker in state.workers:
                worker.actor.break_collectives.remote(problem)

    def _is_stuck(self, state: WorkerGroupState) -> bool:
        """End the processes of ranks that make no progress. Return True if all ranks wait for each other and could not be released."""
        assert isinstance(state, PooledState)
        ranks = [self._group.last.get(rank) for rank in range(len(state.workers))]
        silent_s = state.group.silent_s()
        limit = hang_limit_s(self._limiting_step_s, self.hang_limit_s)
        lost = lost_ranks(ranks, silent_s, limit)
        silent = silent_ranks(ranks, silent_s, limit)
        self._was_hung |= lost != silent
        if len(lost) == len(ranks) and not silent and len(ranks) > 1:
            return self._break_deadlock(state, limit)
        for rank in lost:
            worker = state.workers[rank]
            if actor_id(worker) not in self.pool.workers:
                continue  # its process was already ended, but Ray has not noticed yet
            place, progress = worker.metadata, ranks[rank]
            own_s = limit if progress is None or rank in silent else patience_s(progress, limit)
            self.on_event(CrashEvent("hang", rank=rank, node=place.node_id, pid=place.pid, limit_s=own_s))
            self.pool.drop(actor_id(worker))
        return False

    def _break_deadlock(self, state: WorkerGroupState, limit_s: float) -> bool:
        """Abort the collectives in which all ranks wait for each other. Return True if this was tried before and has not helped."""
        if self._group.broken_at is not None:
            return time.monotonic() - self._group.broken_at > limit_s
        self._group.broken_at = time.monotonic()
        self.on_event(CrashEvent("deadlock", limit_s=limit_s))
        for worker in state.workers:
            worker.actor.break_collectives.remote()
        return False

    def _report_decision(self, decision: Resize | Save, current: int) -> None:
        if isinstance(decision, Save):
            self.on_event(SaveEvent(decision.reason, lead_s=None if decision.ends else LEAVE_S))
            return
        self.on_event(ResizeEvent(current, len(decision.workers), decision.reason))

    def _report_stay(self, view: View, high: int, has_begun: bool) -> None:
        """Report once why the group has fewer workers than it may have, if it still has them after STAY_S."""
        reason = reason_to_stay(view, high, self.grow, self.pool.preparing) if has_begun else None
        if reason == "room" and not self.pool.fleet.spec.is_any:
            reason = None  # the policy may not want more nodes
        now, current = time.monotonic(), sum(slot.in_group for slot in view.slots)
        self._group.stays_since = (self._group.stays_since or now) if reason else None
        if current >= high:
            self._stays.clear()
        if reason is None or reason in self._stays or now - (self._group.stays_since or now) < STAY_S:
            return
        self._stays.add(reason)
        wait_s = view.growth.pays_in_s(current, min(len(view.slots), high)) if reason == "pause" else 0.0
        self.on_event(StayEvent(current, high, reason, wait_s, self.pool.resources))

    def _report_notices(self, state: WorkerGroupState) -> None:
        """Report nodes that will be removed. Train functions without a Run can read this from ray.train.get_preemption_info()."""
        pool = self.pool
        ranks: dict[str, list[int]] = {}
        for rank, worker in enumerate(state.workers):
            ranks.setdefault(worker.metadata.node_id, []).append(rank)
        known = self._noticed | pool.fleet.released
        new = [node for node in pool.notices if node in ranks and node not in known]
        if not new:
            return
        self._noticed |= set(new)
        for node in new:
            when = pool.nodes[node].deadline
            self.on_event(NoticeEvent(node, tuple(ranks[node]), None if when == float("inf") else when))
        deadline = min(pool.nodes[node].deadline or float("inf") for node in new)
        deadline_ms = int(deadline * 1e3) if deadline < float("inf") else None
        info = PreemptionInfo(deadline_ms, {node: ranks[node] for node in pool.notices if node in ranks})
        for worker in state.workers:
            worker.actor.mark_preempt.remote(info)

    def _report_lost_steps(self, begun: list[int]) -> None:
        """Report steps that the former group had committed and this group repeats.

        Args:
            begun: Step at which each rank has begun.
        """
        if not begun:
            return
        lost, self._reached = self._reached - begun[0], -1
        if lost > 0:
            self.on_event(LostEvent(lost, step=begun[0]))

    def _report_waiting(self, ready: int, low: int, preparing: int, rivals: tuple[str, ...]) -> None:
        now = time.monotonic()
        self._wait.since = self._wait.since or now
        # A short wait for starting workers is normal and not reported.
        is_early = now - self._wait.since < (START_S if preparing else 1.0)
        if is_early or (now - self._wait.reported_at < REPORT_INTERVAL_S and ready == self._wait.reported_ready):
            return
        self._wait.reported_at, self._wait.reported_ready = now, ready
        waited_for: WaitedFor = "workers" if ready < low else "state" if self._wait.lost_since else "growth"
        self.on_event(WaitingEvent(ready, preparing, low, waited_for, self.pool.resources, rivals=rivals))

    def _get_num_workers_for_resource_request(self) -> int:
        return int(self.scaling_config.max_workers)

    def _send_resource_request(self) -> None:
        """Request nodes as Ray's own policy does, but with the labels of the wanted nodes, and in the background."""
        if self._requester_id is None:
            return  # the controller has not started
        self._request = self._request or AutoscalerRequest(self._requester_id)
        self._request.send(self.scaling_config._resources_per_worker_not_none, self.pool.fleet.labels)


def _is_more_urgent(decision: Decision, leaving: Decision) -> TypeGuard[Resize | Save]:
    """Return whether the ranks should learn of a decision although they were asked to leave because of another one."""
    if not isinstance(leaving, Resize):
        return False
    return (
        decision.until < leaving.until if isinstance(decision, Resize) else isinstance(decision, Save) and decision.ends
    )


def elastic_statuses(status: WorkerGroupPollStatus) -> list[ElasticStatus]:
    """Return the status of each rank. The status of a rank that has not answered has no progress."""
    statuses = status.worker_statuses.values()
    return [status if isinstance(status, ElasticStatus) else ElasticStatus(**vars(status)) for status in statuses]
