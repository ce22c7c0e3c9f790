"""What Ray Train's controller asks of a scaling policy, answered from the pool and by `undula.elastic.pure.policy`."""

import time
from dataclasses import dataclass, field

from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.preemption import PreemptionInfo

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
    lost_ranks,
)
from undula.elastic.ray.actor import ElasticStatus
from undula.elastic.ray.autoscaler import AutoscalerRequest
from undula.elastic.ray.events import EventSink
from undula.elastic.ray.group import PooledState, actor_id
from undula.elastic.ray.pool import WorkerPool
from undula.recovery.progress import ProgressView
from undula.recovery.worker_state import Request
from undula.state.records import Event

TELL_INTERVAL_S = 30.0
START_S = 15.0
"""In which workers that are being started are expected."""
FIRST_START_PATIENCE_S = 30.0
"""How long a job with fewer workers than there could be waits at its start for those that are being started."""


@dataclass
class GroupView:
    """What is known of the group that trains."""

    last: dict[int, ProgressView] = field(default_factory=dict)
    """By rank: where it stands, as it last said."""
    leaving: Decision | None = None
    """Why it was asked to end."""
    woken: float | None = None
    """When its collectives were broken, as all ranks waited for each other."""

    def steps(self, world_size: int) -> bool:
        """Whether all ranks are in the loop."""
        return len(self.last) == world_size and all(rank.step >= 0 for rank in self.last.values())


@dataclass
class Wait:
    """What is known of a wait for workers."""

    since: float | None = None
    lost_since: float | None = None
    """Since when nobody who is here has the state."""
    told: float = float("-inf")
    told_ready: int = 0
    """As many were ready then."""


@dataclass
class PoolPolicy(ScalingPolicy):
    """What Ray's controller asks; it answers from the pool and by `undula.elastic.pure.policy`."""

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
    """Whether the train function is a Run's, which can leave at a step boundary."""
    _reached: int = -1
    """The step that the group before had come to."""
    _longest_step_s: float = 0.0
    _changes: int = 0
    _pause_began: float | None = None
    _pauses: list[float] = field(default_factory=list)
    _noticed: set[str] = field(default_factory=set)
    _saved: float | None = None
    """The notice since which a checkpoint was asked for."""

    _request: AutoscalerRequest | None = None

    def __post_init__(self) -> None:
        super().__init__(self.scaling_config)

    @property
    def is_leaving(self) -> bool:
        """Whether the group was asked to end."""
        return self._group.leaving is not None

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        pool = self.pool
        pool.tick()
        self._send_resource_request()
        self._group.leaving = None
        ready, low = len(pool.ready()), self.scaling_config.min_workers
        is_filling = not self._has_run and pool.preparing and time.monotonic() - self._began < FIRST_START_PATIENCE_S
        if ready >= low and not (is_filling and ready < self.scaling_config.max_workers) and not self._awaits_state():
            self._wait.since = None
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
        pool = self.pool
        holders = pool.trained_on & {node.id for node in pool.nodes.values() if node.deadline is None}
        is_there = any(worker.has_trained or worker.node in holders for worker in pool.ready())
        if pool.is_rescuing:
            return True
        if is_there or not holders:
            self._wait.lost_since = None
            return False
        self._wait.lost_since = self._wait.lost_since or time.monotonic()
        return time.monotonic() - self._wait.lost_since < START_S

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        pool = self.pool
        pool.tick()
        self._send_resource_request()
        self._has_run = True
        statuses = elastic_statuses(worker_group_status)
        self._learn(statuses)
        if self._is_stuck(worker_group_state):
            return self._resize(len(statuses))
        self._tell_notices(worker_group_state)
        low, high = self.scaling_config.min_workers, self.scaling_config.max_workers
        if leaving := self._group.leaving:
            if not all(status.has_left for status in statuses):
                return NoopDecision()
            return self._resize(len(leaving.workers) if isinstance(leaving, Resize) else low)
        decision = decide(self._view(), low, high, self.grow)
        has_begun = self._group.steps(len(statuses)) if self._is_run else True
        if isinstance(decision, Hold) or not has_begun:
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
        self._group.leaving = decision if request.leaves else None
        for worker in worker_group_state.workers:
            worker.actor.ask.remote(request)
        return NoopDecision()

    def _resize(self, num_workers: int) -> ResizeDecision:
        self._reached = max([self._reached, *(rank.step for rank in self._group.last.values())])
        self._group, self._wait = GroupView(), Wait()
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
            seats=pool.seats(),
            deadlines=deadlines,
            noticed=pool.newest_notice,
            growth=Growth(interval, cost),
            is_saved=self._saved == pool.newest_notice,
            step_s=self._longest_step_s,
        )

    def _learn(self, statuses: list[ElasticStatus]) -> None:
        """Where the ranks stand."""
        for rank, status in enumerate(statuses):
            if status.progress:
                self._is_run = True
                self._group.last[rank] = status.progress
                self.pool.worker_bytes = status.resident_bytes
        ranks = self._group.last.values()
        self._tell_lost([rank.began for rank in ranks if rank.began >= 0])
        if self._pause_began and any(rank.longest_step_s for rank in ranks):
            self._pauses.append(time.monotonic() - self._pause_began)
            self._pause_began = None
        # A group that has just begun is measured by the steps of the one before.
        self._longest_step_s = max((rank.longest_step_s for rank in ranks), default=0.0) or self._longest_step_s
        if self.grow == "never":  # more would lie idle
            self.pool.fleet.size = max(len(statuses), self.scaling_config.min_workers)
        if self._group.steps(len(statuses)):
            self.pool.fleet.pace.saw(max(rank.step for rank in ranks), len(statuses), time.time())

    def _is_stuck(self, state: WorkerGroupState) -> bool:
        """End the processes of ranks that make no step; whether all wait for each other instead, and nothing could wake them."""
        assert isinstance(state, PooledState)
        ranks = [self._group.last.get(rank) for rank in range(len(state.workers))]
        silent_s = state.group.silent_s()
        limit = hang_limit_s(self._longest_step_s, self.hang_limit_s)
        lost = lost_ranks(ranks, silent_s, limit)
        if len(lost) == len(ranks) and max(silent_s) <= limit and len(ranks) > 1:
            return self._wake(state, limit)
        for rank in lost:
            worker = state.workers[rank]
            if actor_id(worker) not in self.pool.workers:
                continue  # it was ended, and Ray has not noticed yet
            where = f"rank {rank} (process {worker.metadata.pid} on {worker.metadata.node_ip})"
            self.on_event(
                Event("crash", f"{where} made no step for {limit:.1f} s: treated as lost", data={"rank": rank})
            )
            self.pool.drop(actor_id(worker))
        return False

    def _wake(self, state: WorkerGroupState, limit_s: float) -> bool:
        """Break the collective in which all ranks wait for each other; whether that was tried before, and they wait still."""
        if self._group.woken is not None:
            return time.monotonic() - self._group.woken > limit_s
        self._group.woken = time.monotonic()
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
        pool = self.pool
        ranks: dict[str, list[int]] = {}
        for rank, worker in enumerate(state.workers):
            ranks.setdefault(worker.metadata.node_id, []).append(rank)
        told = self._noticed | pool.fleet.given_back
        new = [node for node in pool.notices if node in ranks and node not in told]
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
        self._wait.since = self._wait.since or now
        is_early = now - self._wait.since < (START_S if preparing else 1.0)  # workers that start are no news
        if is_early or (now - self._wait.told < TELL_INTERVAL_S and ready == self._wait.told_ready):
            return
        self._wait.told, self._wait.told_ready = now, ready
        need = ", ".join(f"{amount:g} {name}" for name, amount in self.pool.resources.items() if amount)
        missing = f"{low - ready} more worker{'s' if low - ready > 1 else ''} of {need}"
        what = (
            missing
            if ready < low
            else "a node that may have the run's state"
            if self._wait.lost_since
            else "more workers"
        )
        words = f"waiting for {what}: {ready} ready, {preparing} starting, at least {low} needed"
        self.on_event(Event("waiting", words, data={"ready": ready}))

    def _get_num_workers_for_resource_request(self) -> int:
        return int(self.scaling_config.max_workers)

    def _send_resource_request(self) -> None:
        """As Ray's, but it says which nodes are wanted, and waits for nothing."""
        if self._requester_id is None:
            return  # the controller has not started yet
        self._request = self._request or AutoscalerRequest(self._requester_id)
        self._request.send(self.scaling_config._resources_per_worker_not_none, self.pool.fleet.labels)


def elastic_statuses(status: WorkerGroupPollStatus) -> list[ElasticStatus]:
    """By rank; a rank that has not answered has told nothing."""
    statuses = status.worker_statuses.values()
    return [each if isinstance(each, ElasticStatus) else ElasticStatus(**vars(each)) for each in statuses]
