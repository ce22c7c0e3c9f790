"""Worker group of Ray Train whose workers come from a pool and return to it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupContext, WorkerGroupState
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.util import invoke_context_managers

from undula.elastic.pure.ranks import order_by_state
from undula.elastic.ray.failures import NotEnoughWorkersError
from undula.elastic.ray.pool import WorkerPool
from undula.elastic.ray.pooled_worker import LEAVE_TIMEOUT_S, PooledWorker
from undula.errors import UndulaError


@dataclass(frozen=True)
class WorkerGroups:
    """Factory of worker groups from a pool. It replaces the class that Ray's controller uses."""

    pool: WorkerPool

    def create(
        self, train_run_context: TrainRunContext, worker_group_context: WorkerGroupContext, callbacks: Any = None
    ) -> "ElasticWorkerGroup":
        group = ElasticWorkerGroup(train_run_context, worker_group_context, callbacks)
        group.start_from(self.pool)
        return group


class NoPlacementGroup(PlacementGroupHandle):
    """Substitute for a placement group, which a pooled group does not need because its actors hold their own resources."""

    placement_group: Any = None

    def ready(self) -> Any: ...

    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class PooledState(WorkerGroupState):
    """State of a group whose workers return to their pool."""

    group: "ElasticWorkerGroup"
    pool: WorkerPool

    def shutdown(self) -> None:
        self.group.ask_to_leave()
        while not self.pool.await_left(LEAVE_TIMEOUT_S):
            pass


class ElasticWorkerGroup(WorkerGroup):
    """Worker group of Ray Train with workers from a pool."""

    def start_from(self, pool: WorkerPool) -> None:
        """Start the group with the first ready workers of a pool.

        Raises:
            NotEnoughWorkersError: Too few workers are ready.
            WorkerGroupStartupFailedError: A worker was lost during the start. The other workers are back in the pool.
        """
        context = self._worker_group_context
        members = pool.responsive(pool.ready()[: context.num_workers])
        if len(members) < context.num_workers:
            raise NotEnoughWorkersError(f"the group needs {context.num_workers} workers, and {len(members)} are left")
        for member in members:
            member.in_group = member.has_trained = True
            member.export = None  # the exported state is older than the one that the worker will hold
            pool.trained_on.add(member.node)
        workers = self._assign_worker_ranks([_as_worker(member, context) for member in members])
        if pool.shares_state:
            workers = _numbered_by_state(workers, {member.id: member.place for member in members})
        for worker in workers:
            rank = worker.distributed_context.world_rank if worker.distributed_context else 0
            pool.workers[actor_id(worker)].place = rank, len(workers)
        workers = _ranked_by_node(workers)
        state = PooledState(time.monotonic(), NoPlacementGroup(), workers, pool.sync_actor(), self, pool)
        try:
            self._begin(state, context)
        except Exception as error:
            self._worker_group_state = state
            state.shutdown()
            self._clear_state()  # type: ignore[no-untyped-call]
            if isinstance(error, ray.exceptions.RayError) and not isinstance(error, UndulaError):
                raise WorkerGroupStartupFailedError(f"a worker was lost while the group started: {error}") from error
            raise

    def silent_s(self) -> list[float]:
        """Return the seconds for which each rank has not answered the current poll."""
        now = time.monotonic()
        polls = [self._world_rank_to_ongoing_poll.get(rank) for rank in range(len(self.get_workers()))]
        return [now - poll.start_time if poll else 0.0 for poll in polls]

    def ask_to_leave(self) -> bool:
        """Ask the workers to leave the group. Return False if they were asked before."""
        state = self.get_worker_group_state()
        assert isinstance(state, PooledState)
        ids = [actor_id(worker) for worker in state.workers]
        return state.pool.ask_to_leave(dict(zip(ids, self.silent_s(), strict=True)))

    def _begin(self, state: PooledState, context: WorkerGroupContext) -> None:
        managers: list[Any] = [callback.on_worker_group_start for callback in self._callbacks]
        with invoke_context_managers(managers):
            for callback in self._callbacks:
                callback.before_worker_group_start(context)
            self._replica_groups = [
                ReplicaGroup([worker], context.resources_per_worker, list(self._replica_group_callbacks))
                for worker in state.workers
            ]
            self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(state.workers))}
            self._init_train_context(state.workers, state.sync_actor)
            self._worker_group_state = state
            for callback in self._callbacks:
                callback.after_worker_group_start(self)
        ray.get([worker.actor.run_train_fn.remote(context.train_fn_ref) for worker in state.workers])
        for callback in self._callbacks:
            callback.after_worker_group_training_start(self)


def actor_id(worker: Worker) -> str:
    """Return the id of a worker's actor, which is also its id in the pool."""
    return str(worker.actor._actor_id.hex())


def _ranked_by_node(workers: list[Worker]) -> list[Worker]:
    """Assign local ranks by node and return the workers. Ray Train assigns them by address, which several nodes on one machine share."""
    nodes: dict[str, list[Worker]] = {}
    for worker in workers:
        nodes.setdefault(worker.metadata.node_id, []).append(worker)
    for node_rank, peers in enumerate(nodes.values()):
        for local_rank, worker in enumerate(peers):
            assert worker.distributed_context is not None
            worker.distributed_context = replace(
                worker.distributed_context, local_rank=local_rank, local_world_size=len(peers), node_rank=node_rank
            )
    return workers


def _numbered_by_state(workers: list[Worker], places: Mapping[str, tuple[int, int] | None]) -> list[Worker]:
    """Number workers so that they have as much as possible of what their ranks need, and return them in the order of their ranks.

    Args:
        workers: The workers.
        places: Rank in the last group and number of its ranks, by id of the worker; None for a new worker.
    """
    numbered = [workers[number] for number in order_by_state([places[actor_id(worker)] for worker in workers])]
    for rank, worker in enumerate(numbered):
        assert worker.distributed_context is not None
        worker.distributed_context = replace(worker.distributed_context, world_rank=rank)
    return numbered


def _as_worker(member: PooledWorker, context: WorkerGroupContext) -> Worker:
    assert member.metadata is not None
    return Worker(member.actor, member.metadata, context.resources_per_worker)
