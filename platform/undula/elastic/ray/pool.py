"""The worker processes of a run: started beside the training that goes on, kept from one worker group to the next."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationActor
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata
from ray.train.v2._internal.util import ObjectRefWrapper, bundle_to_remote_args

from undula.elastic.pure.fleet import FleetManager
from undula.elastic.pure.nodes import Node
from undula.elastic.pure.policy import Seat
from undula.elastic.ray.actor import ElasticWorker
from undula.elastic.ray.capacity import Labels, look
from undula.recovery.replica_store import ReplicaStore
from undula.recovery.snapshot import parsed
from undula.state.records import Event
from undula.telemetry.hub import UNRECORDED

LOOK_INTERVAL_S = 0.25
RETRY_S = 2.0
"""Between attempts to start workers on one node: Ray's head learns of a change with a delay."""
START_TIMEOUT_S = 300.0
ANSWER_S = 0.5
"""A worker whose process has given no sign for this time is gone, as its whole node may be."""
ASK_S = 0.05
"""What one gets in any case to say that it is there."""
PATIENCE_S = 26.0
"""For a worker to end what its group has left running, a rendezvous that fails included."""
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
"""For glibc, of workers that train on a CPU: each group's train function has a thread of its own, and would fault its activations in
anew, which takes as long as the first step itself. So all threads share one heap, whose memory is kept."""


@dataclass
class PooledWorker:
    """A worker process, from its start on."""

    actor: Any
    node: str
    preparing: Any
    """The answer of `prepare`, to come."""
    started: float
    metadata: ActorMetadata | None = None
    """Once it is ready."""
    in_group: bool = False
    has_trained: bool = False
    """Whether it has been in a group, and may hold the run's state."""
    giving: Any = None
    """The answer of `give_state`, to come, where its node will go."""

    @property
    def id(self) -> str:
        return str(self.actor._actor_id.hex())


@dataclass
class WorkerPool:
    """Starts as many workers as the fleet wants and the cluster has room for, and keeps them.

    Each is an actor of its own, pinned to its node: no placement group, as a group is only ever made of workers that are ready.
    """

    train_fn_ref: ObjectRefWrapper[Any]
    prepare: Callable[[], None] | None
    resources: dict[str, float]
    runtime_env: dict[str, Any]
    fleet: FleetManager
    on_event: Callable[[Event], None]
    nodes: dict[str, Node] = field(default_factory=dict)
    notices: dict[str, float] = field(default_factory=dict)
    """When the notice of each node that will go was first seen, in seconds since the epoch."""
    workers: dict[str, PooledWorker] = field(default_factory=dict)
    worker_bytes: int = 0
    """Memory of a worker that trains, as last seen."""
    trained_on: set[str] = field(default_factory=set)
    """Nodes on which workers have trained, and whose memory may hold the run's state."""
    keeper: ReplicaStore = field(default_factory=ReplicaStore)
    failure: RayTaskError | None = None
    """Of the last worker that could not be made ready, as it raised an exception: most often the script cannot be imported there."""
    _looked: float = float("-inf")
    _labels: Labels = field(default_factory=Labels)
    _tried: dict[str, float] = field(default_factory=dict)
    _sync_actor: Any = None

    def tick(self) -> None:
        """Look around, and start and drop workers accordingly; never waits."""
        now = time.monotonic()
        if now - self._looked >= LOOK_INTERVAL_S:
            self._looked = now
            self.nodes = self._look()
            going = [node.id for node in self.nodes.values() if node.deadline is not None]
            self.notices = {node: self.notices.get(node, time.time()) for node in going}
        self._collect_prepared()
        for worker in [worker for worker in self.workers.values() if not worker.in_group]:
            is_late = worker.metadata is None and now - worker.started > START_TIMEOUT_S
            is_going = worker.node in self.notices and self._is_rescued(worker)
            if worker.node not in self.nodes or is_going or is_late:
                self.drop(worker.id)
        self._start_missing(now)

    def _look(self) -> dict[str, Node]:
        """The nodes that are alive; one that the fleet gives back goes at a time that is not known."""
        nodes = self._labels.on(look(self.resources))
        ready = Counter(worker.node for worker in self.workers.values() if worker.metadata)
        self.fleet.look(nodes, ready, Counter(worker.node for worker in self.workers.values()), time.time())
        return {
            node.id: replace(node, deadline=node.deadline or float("inf")) if node.id in self.fleet.given_back else node
            for node in nodes.values()
        }

    def _is_rescued(self, worker: PooledWorker) -> bool:
        """Whether nothing of the run would go with a worker whose node will; asks it for its state where something might."""
        staying = (each for each in self.workers.values() if each.node in self.nodes and each.node not in self.notices)
        if not worker.has_trained or any(each.has_trained for each in staying):
            return True
        if worker.giving is None:
            if self.is_rescuing:  # one after another: the head's memory is small
                return False
            worker.giving = worker.actor.give_state.remote(self.keeper.room(), self.keeper.newest_whole)
        done, _ = ray.wait([worker.giving], timeout=0)
        if not done:
            return False
        try:
            found = ray.get(worker.giving)
        except RayError:
            return True
        if isinstance(found, str):
            self.on_event(Event("notice", f"the newest state goes with its last node: {found}"))
        elif found:
            meta, data = found
            self.keeper.keep(worker.id, parsed(meta, bytearray(data)))
        return True

    @property
    def is_rescuing(self) -> bool:
        """Whether a worker's state that may be the only one is on its way."""
        return any(worker.giving and not worker.in_group for worker in self.workers.values())

    def ready(self) -> list[PooledWorker]:
        """Workers that can be in a group, those that have been in one first: they hold the state."""
        found = [worker for worker in self.workers.values() if worker.metadata and worker.node not in self.notices]
        return sorted(found, key=lambda worker: (not worker.has_trained, worker.started))

    @property
    def newest_notice(self) -> float:
        """When it came, in seconds since the epoch; 0 where no node will go."""
        return max(self.notices.values(), default=0.0)

    @property
    def preparing(self) -> int:
        """Workers that will be ready."""
        return sum(worker.metadata is None for worker in self.workers.values())

    def seats(self) -> list[Seat]:
        """For the policy."""
        return [Seat(worker.id, worker.node, worker.in_group) for worker in self.workers.values() if worker.metadata]

    def sync_actor(self) -> Any:
        """The actor that Ray Train's reports meet in; one for all groups."""
        if self._sync_actor is None:
            here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
            actor_class: Any = SynchronizationActor
            self._sync_actor = actor_class.options(label_selector=here, **UNRECORDED).remote()
        else:
            self._sync_actor.reset.remote()
        return self._sync_actor

    def answering(self, members: Sequence[PooledWorker]) -> list[PooledWorker]:
        """Those that say that they are there, in the same order; the others go, or a group of them would be waited for without end."""
        there = _those_that_say_yes({member.actor.answer.remote(): member for member in members}, ANSWER_S)
        for member in members:
            if member not in there:
                self.drop(member.id, "does not answer")
        return [member for member in members if member in there]

    def take_back(self, silent_s: Mapping[str, float]) -> None:
        """End a group: its workers stay where they can; those that do not answer, or cannot be in another group, go.

        Args:
            silent_s: for how long each worker of the group has given no sign.
        """
        members = [self.workers[each] for each in silent_s if each in self.workers]
        answers = {worker.actor.answer.remote(): worker for worker in members}
        answering = _answering(answers, {worker.id: max(ANSWER_S - silent_s[worker.id], ASK_S) for worker in members})
        leaving = {worker.actor.leave.remote(PATIENCE_S / 2): worker for worker in answering}
        left = [worker.id for worker in _those_that_say_yes(leaving, PATIENCE_S)]
        for worker in members:
            worker.in_group = False
            if worker.id not in left:
                self.drop(worker.id, "cannot be in another group" if worker in answering else None)

    def drop(self, worker: str, why: str | None = None) -> None:
        """End a worker's process; at once, where it is stopped and another of its machine can.

        Args:
            worker: its id.
            why: told, where nobody would know otherwise.
        """
        gone = self.workers.pop(worker, None)
        if gone is None:
            return
        if why and gone.metadata:
            who = f"process {gone.metadata.pid} on {gone.node[:8]}"
            self.on_event(Event("crash", f"{who} {why}: ended, its node gets another one", data={"node": gone.node}))
        ray.kill(gone.actor)
        for other in self.workers.values():
            if gone.metadata and other.metadata and other.metadata.hostname == gone.metadata.hostname:
                other.actor.kill.remote(gone.metadata.pid)
                return

    def close(self) -> None:
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
            except RayError as error:
                self.drop(worker.id)
                self._tried[worker.node] = time.monotonic()
                self.failure = error if isinstance(error, RayTaskError) else self.failure

    def _start_missing(self, now: float) -> None:
        staying = [worker.node for worker in self.workers.values() if worker.node not in self.notices]
        there = Counter(self.nodes[node].market for node in staying if node in self.nodes)
        for node in sorted(self.nodes.values(), key=lambda node: -node.free):
            own = sum(worker.node == node.id for worker in self.workers.values())
            count = min(node.free, node.slots - own, self.fleet.room(node.market, there))
            if node.deadline is None and count > 0 and now - self._tried.get(node.id, float("-inf")) >= RETRY_S:
                self._tried[node.id] = now
                there[node.market] += count
                if self.trained_on:
                    words = f"node {node.id[:8]} has room: {count} worker{'s' * (count > 1)} being started there"
                    self.on_event(Event("node", words, data={"node": node.id}))
                for _ in range(count):
                    self._start(node.id, now)

    def _start(self, node: str, now: float) -> None:
        options = bundle_to_remote_args(self.resources)
        own = {} if self.resources.get("GPU") else KEEP_MEMORY
        runtime_env = {**self.runtime_env, "env_vars": {**own, **self.runtime_env.get("env_vars", {})}}
        here = {"ray.io/node-id": node}
        # A trial of Ray Tune has a placement group, and the actors that it starts would have to fit into it.
        options["scheduling_strategy"] = "DEFAULT"
        actor_class = ray.remote(runtime_env=runtime_env, label_selector=here, **options, **UNRECORDED)
        actor: Any = actor_class(ElasticWorker).remote()
        worker_bytes = 0 if self.resources.get("GPU") else self.worker_bytes
        home = ray.get_runtime_context().get_node_id()
        preparing = actor.prepare.remote(self.train_fn_ref, self.prepare, worker_bytes, home)
        worker = PooledWorker(actor, node, preparing, now)
        self.workers[worker.id] = worker


def _answering(answers: dict[Any, PooledWorker], patience_s: Mapping[str, float]) -> list[PooledWorker]:
    """Those that answer, waiting for those that have not as long as the most patient of them says."""
    asked, found = time.monotonic(), []
    while answers:
        left = max(patience_s[worker.id] for worker in answers.values()) - (time.monotonic() - asked)
        done, _ = ray.wait(list(answers), num_returns=1, timeout=max(left, 0))
        if not done:
            break
        worker = answers.pop(done[0])
        found += [worker] if _is_yes(done[0]) else []
    return found


def _those_that_say_yes(answers: Mapping[Any, PooledWorker], timeout_s: float) -> list[PooledWorker]:
    """Whose answer comes within the time, and is neither False nor an error."""
    if not answers:
        return []
    done, _ = ray.wait(list(answers), num_returns=len(answers), timeout=timeout_s)
    return [answers[answer] for answer in done if _is_yes(answer)]


def _is_yes(answer: Any) -> bool:
    try:
        return ray.get(answer) is not False
    except RayError:
        return False
