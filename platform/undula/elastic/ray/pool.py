"""Pool of a run's worker processes. New workers start while a group trains, and all workers stay from one group to the next."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError
from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationActor
from ray.train.v2._internal.util import ObjectRefWrapper, bundle_to_remote_args

from undula.elastic.pure.fleet import FleetManager
from undula.elastic.pure.nodes import Node
from undula.elastic.pure.policy import WorkerSlot
from undula.elastic.ray.actor import ElasticWorker, WorkerMetadata
from undula.elastic.ray.capacity import Labels, alive_nodes
from undula.elastic.ray.environment import variables_of_worker
from undula.elastic.ray.pooled_worker import LEAVE_TIMEOUT_S, PooledWorker, accepted, departure_of, responding_in_time
from undula.errors import ClusterError
from undula.recovery.replica_store import Replica, ReplicaStore
from undula.recovery.snapshot import NEVER, Age
from undula.state.events import CrashEvent, Event, NodeEvent, WarningEvent
from undula.telemetry.hub import UNRECORDED

OBSERVE_INTERVAL_S = 0.25
"""Seconds between two observations of the cluster's nodes."""
RETRY_S = 2.0
"""Minimum seconds between two attempts to start workers on a node, because Ray's head learns of a change with a delay."""
START_TIMEOUT_S = 300.0
"""Maximum seconds from the start of a worker until it is ready."""
PING_TIMEOUT_S = 0.5
"""Seconds without an answer from a worker after which its process or its node counts as lost."""
WAIT_FOR_GROUP_S = 2.0
"""Seconds for which a worker on a node that will be removed waits for a group that needs its state, before it sends this to the head."""
LAST_MOMENT_S = 5.0
"""Seconds before the removal of its node at which a worker sends its state to the head, whether a group is starting or not."""
MIN_PING_TIMEOUT_S = 0.05
"""Minimum time in seconds that a worker gets to answer a ping."""


@dataclass
class WorkerPool:
    """Pool that starts as many workers as the fleet wants and the cluster has room for, and keeps them between groups.

    Each worker is an actor that is pinned to its node. No placement group is necessary, because a group consists of ready workers only.
    """

    train_fn_ref: ObjectRefWrapper[Any]
    prepare: Callable[[], None] | None
    resources: dict[str, float]
    runtime_env: dict[str, Any]
    fleet: FleetManager
    on_event: Callable[[Event], None]
    start_timeout_s: float = START_TIMEOUT_S
    """Maximum seconds from the start of a worker until it is ready."""
    nodes: dict[str, Node] = field(default_factory=dict)
    notices: dict[str, float] = field(default_factory=dict)
    """Time at which the notice of each node was first observed, in seconds since the epoch."""
    workers: dict[str, PooledWorker] = field(default_factory=dict)
    worker_bytes: int = 0
    """Last reported resident memory of a worker that trains, in bytes; 0 before the first report."""
    exported: Age = NEVER
    """Age of the last state of which a worker has exported what all ranks hold."""
    shares_state: bool = False
    """Whether the ranks hold different parts of the state."""
    lost_on: set[str] = field(default_factory=set)
    """Ids of the nodes on which a worker that had trained was lost, until a group has committed a step."""
    trained_on: set[str] = field(default_factory=set)
    """Ids of the nodes on which workers have trained. The memory of these nodes may hold the run's state."""
    replicas: ReplicaStore = field(default_factory=ReplicaStore)
    gives_way: bool = False
    """Whether the run gives its workers to other runs for a while: they end as on nodes that will be removed, and no new ones start."""
    is_ending: bool = False
    """Whether the job ends, so that no other group follows."""
    must_stay: bool = False
    """Whether the run keeps its workers, because nothing else can hold its state."""
    failure: RayTaskError | None = None
    """Exception of the last worker that did not become ready, most often because it cannot import the script; None once one is ready."""
    refusal: ClusterError | None = None
    """Error of the last worker that cannot train on its node, where no other worker could either; None if there is none."""
    start_s: float | None = None
    """Seconds that the last worker took until it was ready; None before the first one is."""
    _observed_at: float = float("-inf")
    _labels: Labels = field(default_factory=Labels)
    _tried: dict[str, float] = field(default_factory=dict)
    _sync_actor: Any = None

    def tick(self) -> None:
        """Observe the nodes, then start and drop workers accordingly. This call does not block."""
        now = time.monotonic()
        if now - self._observed_at >= OBSERVE_INTERVAL_S:
            self._observed_at = now
            self.nodes = self._observe_nodes()
            noticed = [node.id for node in self.nodes.values() if node.deadline is not None]
            self.notices = {node: self.notices.get(node, time.time()) for node in noticed}
        self._collect_prepared()
        for worker in [worker for worker in self.workers.values() if not worker.in_group]:
            is_late = worker.metadata is None and now - worker.started > self.start_timeout_s
            may_leave = worker.leaving is None and worker.node in self.notices and self._preserve_state(worker)
            if worker.node not in self.nodes or may_leave or is_late:
                self.drop(worker.id)
        self._start_missing(now)

    def _observe_nodes(self) -> dict[str, Node]:
        """Return the nodes that are alive. A node that is given back counts as a node that will be removed at an unknown time."""
        nodes = self._labels.on(alive_nodes(self.resources))
        ready = Counter(worker.node for worker in self.workers.values() if worker.metadata)
        self.fleet.update(nodes, ready, Counter(worker.node for worker in self.workers.values()), time.time())
        return {
            node.id: replace(node, deadline=node.deadline or float("inf"))
            if self.gives_way or node.id in self.fleet.released
            else node
            for node in nodes.values()
        }

    def _preserve_state(self, worker: PooledWorker) -> bool:
        """Preserve the run's state before a worker leaves with its node, and return whether the worker may leave.

        A group that starts gets from the worker what no other one has. If no group starts, or if the node is about to be removed, the
        worker must export its state to the replica store. If the export fails, the result is True, because nothing is left to wait for.
        """
        staying = (
            other for other in self.workers.values() if other.node in self.nodes and other.node not in self.notices
        )
        is_held = not self.shares_state and any(other.holds_state for other in staying)
        if not worker.holds_state or is_held:
            return True
        is_starting = any(other.in_group for other in self.workers.values())
        removed_in_s = (self.nodes[worker.node].deadline or float("inf")) - time.time()
        may_wait = is_starting or worker.is_refused or time.monotonic() - worker.left_at < WAIT_FOR_GROUP_S
        if worker.export is None and may_wait and removed_in_s > LAST_MOMENT_S:
            return False
        if worker.is_refused:
            return True
        if worker.export is None:
            if self.is_exporting:  # the head has little memory, so only one worker exports at a time
                return False
            given = self.replicas.room(), self.replicas.newest_whole, self.exported
            worker.export = worker.actor.export_state.remote(*given)
        done, _ = ray.wait([worker.export], timeout=0)
        if not done:
            return False
        try:
            exported = ray.get(worker.export)
        except RayError:
            return True
        if isinstance(exported, str):
            self.on_event(WarningEvent("state_at_risk", exported))
            if self.gives_way:  # it need not leave
                self.gives_way, self.must_stay, worker.export = False, True, None
                return False
            if removed_in_s > LAST_MOMENT_S:  # a group may still start before that
                worker.is_refused, worker.export = True, None
                return False
        elif exported:
            meta, data = exported
            replica = Replica.of(meta, bytearray(data))
            self.replicas.keep(worker.id, replica)
            self.exported = replica.age
        return True

    @property
    def is_exporting(self) -> bool:
        """Whether a worker is exporting a state that may be the only copy."""
        return any(worker.export and not worker.in_group for worker in self.workers.values())

    def leavers(self) -> list[PooledWorker]:
        """Return the workers that are in no group but may hold the newest state."""
        return [worker for worker in self.workers.values() if worker.has_trained and not worker.in_group]

    def restored(self) -> None:
        """Record that the group has committed a step, so that it needs nothing more of other workers."""
        self.lost_on.clear()
        for worker in self.workers.values():
            worker.holds_state = worker.in_group

    def ready(self) -> list[PooledWorker]:
        """Return the workers that can join a group.

        First come those that may hold the state, and those on nodes whose memory may have the part of a lost worker.
        """
        known = (worker for worker in self.workers.values() if worker.metadata and worker.leaving is None)
        ready = [worker for worker in known if worker.node not in self.notices]
        return sorted(
            ready, key=lambda worker: (not worker.has_trained and worker.node not in self.lost_on, worker.started)
        )

    @property
    def newest_notice(self) -> float:
        """Time of the newest notice in seconds since the epoch; 0 if no node will be removed."""
        return max(self.notices.values(), default=0.0)

    @property
    def preparing(self) -> int:
        """Number of workers that are starting."""
        return sum(worker.metadata is None for worker in self.workers.values())

    def worker_slots(self) -> list[WorkerSlot]:
        """Return the ready workers in the form that the policy uses."""
        return [
            WorkerSlot(worker.id, worker.node, worker.in_group) for worker in self.workers.values() if worker.metadata
        ]

    def sync_actor(self) -> Any:
        """Return the actor that synchronizes Ray Train's reports. All groups share it."""
        if self._sync_actor is None:
            here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
            actor_class: Any = SynchronizationActor
            self._sync_actor = actor_class.options(label_selector=here, **UNRECORDED).remote()
        else:
            self._sync_actor.reset.remote()
        return self._sync_actor

    def responsive(self, members: Sequence[PooledWorker]) -> list[PooledWorker]:
        """Return the members that answer a ping, in the same order. Drop the others, because the start of a group could block on them."""
        present = accepted({member.actor.ping.remote(): member for member in members}, PING_TIMEOUT_S)
        for member in members:
            if member not in present:
                self.drop(member.id, "unresponsive")
        return [member for member in members if member in present]

    def ask_to_leave(self, silent_s: Mapping[str, float]) -> bool:
        """Ask the workers of a group to leave it, and drop those that do not answer. Workers that were asked before are ignored.

        Args:
            silent_s: Seconds for which each worker of the group has not answered, by worker id.

        Returns:
            Whether any worker was still in the group.
        """
        members = [self.workers[id] for id in silent_s if id in self.workers and self.workers[id].in_group]
        timeouts_s = {worker.id: max(PING_TIMEOUT_S - silent_s[worker.id], MIN_PING_TIMEOUT_S) for worker in members}
        responsive = responding_in_time({worker.actor.ping.remote(): worker for worker in members}, timeouts_s)
        for worker in members:
            worker.in_group = False
            if worker not in responsive:
                self.drop(worker.id)
        for worker in responsive:
            worker.leave()
        return bool(members)

    def await_left(self, timeout_s: float) -> bool:
        """Wait until all leaving workers have left or `timeout_s` is over. Return whether all have left.

        A worker may take long to copy its state to host memory, so it is dropped only if it makes no progress or cannot be used again.
        """
        leaving = {worker.leaving: worker for worker in self.workers.values() if worker.leaving is not None}
        done, _ = ray.wait(list(leaving), num_returns=len(leaving), timeout=timeout_s) if leaving else ([], [])
        for answer, worker in leaving.items():
            if answer in done:
                worker.leaving = None
                match departure_of(answer):
                    case "left":
                        worker.left_at, worker.is_refused = time.monotonic(), False
                    case "busy":
                        worker.leave()
                    case "unusable":
                        self.drop(worker.id, "unusable")
            elif time.monotonic() - worker.asked_at > LEAVE_TIMEOUT_S:
                self.drop(worker.id, "unusable")
        return not any(worker.leaving is not None for worker in self.workers.values())

    def drop(self, worker: str, cause: Literal["unresponsive", "unusable"] | None = None) -> None:
        """End a worker's process. Workers that can see it kill it as well, because Ray cannot end a suspended process.

        Args:
            worker: Id of the worker.
            cause: Cause of the crash to report; None if another event reports the loss.
        """
        gone = self.workers.pop(worker, None)
        if gone is None:
            return
        if gone.has_trained:
            self.lost_on.add(gone.node)
        if cause and gone.metadata and not self.is_ending:
            self.on_event(CrashEvent(cause, node=gone.node, pid=gone.metadata.pid))
        ray.kill(gone.actor)
        if gone.metadata:
            for other in _that_see(gone.metadata, self.workers.values()):
                other.actor.kill_process.remote(gone.metadata.process)

    def close(self) -> None:
        """End all workers."""
        for worker in list(self.workers):
            ray.kill(self.workers.pop(worker).actor)
        if self._sync_actor is not None:
            ray.kill(self._sync_actor)

    def _collect_prepared(self) -> None:
        waiting = {worker.preparing: worker for worker in self.workers.values() if worker.metadata is None}
        done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0) if waiting else ([], [])
        for answer in done:
            worker = waiting[answer]
            try:
                worker.metadata, self.failure = ray.get(answer), None
                self.start_s = time.monotonic() - worker.started
            except RayError as error:
                self.drop(worker.id)
                self._tried[worker.node] = time.monotonic()
                self.failure = error if isinstance(error, RayTaskError) else self.failure
                if isinstance(error, RayTaskError) and isinstance(error.cause, ClusterError):
                    self._refuse(worker.node, error.cause)

    def _refuse(self, node: str, error: ClusterError) -> None:
        """Start no more workers on a node on which a worker cannot train."""
        self.refusal = error
        self._tried[node] = float("inf")
        if self.trained_on:
            self.on_event(WarningEvent("node_refused", str(error)))

    def _start_missing(self, now: float) -> None:
        staying = [worker.node for worker in self.workers.values() if worker.node not in self.notices]
        by_market = Counter(self.nodes[node].market for node in staying if node in self.nodes)
        for node in sorted(self.nodes.values(), key=lambda node: (node.id not in self.lost_on, -node.free)):
            own = sum(worker.node == node.id for worker in self.workers.values())
            count = min(node.free, node.slots - own, self.fleet.room(node.market, by_market))
            if node.deadline is None and count > 0 and now - self._tried.get(node.id, float("-inf")) >= RETRY_S:
                self._tried[node.id] = now
                by_market[node.market] += count
                if self.trained_on:
                    self.on_event(NodeEvent(node.id, count, self.start_s))
                for _ in range(count):
                    self._start(node.id, now)

    def _start(self, node: str, now: float) -> None:
        options = bundle_to_remote_args(self.resources)
        own = self.runtime_env.get("env_vars", {})
        runtime_env = {**self.runtime_env, "env_vars": {**variables_of_worker(self.resources), **own}}
        here = {"ray.io/node-id": node}
        # Actors that a trial of Ray Tune starts would otherwise have to fit into the trial's placement group.
        options["scheduling_strategy"] = "DEFAULT"
        actor_class = ray.remote(runtime_env=runtime_env, label_selector=here, **options, **UNRECORDED)
        actor: Any = actor_class(ElasticWorker).remote()
        worker_bytes = 0 if self.resources.get("GPU") else self.worker_bytes
        home = ray.get_runtime_context().get_node_id()
        preparing = actor.prepare.remote(self.train_fn_ref, self.prepare, worker_bytes, home)
        worker = PooledWorker(actor, node, preparing, now)
        self.workers[worker.id] = worker


def _that_see(gone: WorkerMetadata, others: Iterable[PooledWorker]) -> list[PooledWorker]:
    """Return the workers whose process belongs to the same machine and process namespace.

    Containers can have the same hostname and different process ids, so that a hostname and an id do not identify a process. All of these
    workers are asked to kill it, because one of them can be suspended, too.
    """
    namespace = gone.process.namespace
    return [other for other in others if other.metadata and namespace and other.metadata.process.namespace == namespace]
