"""Notices: Ray's word that a node of ours will go, brought to the workers."""

from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.preemption import PreemptionWatcher
from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupContext


class NoticeWatch(WorkerGroupCallback):
    """Runs Ray's PreemptionWatcher as a thread of the controller, where Ray starts an actor for it with each worker group."""

    def __init__(self) -> None:
        self._watcher: PreemptionWatcher | None = None

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        self._stop()
        ranks_of_node: dict[str, list[int]] = {}
        actors = {}
        for worker in worker_group.get_workers():
            assert worker.distributed_context is not None
            rank = worker.distributed_context.world_rank
            ranks_of_node.setdefault(worker.metadata.node_id, []).append(rank)
            actors[rank] = worker.actor
        self._watcher = PreemptionWatcher(node_to_ranks=ranks_of_node, worker_actors_by_rank=actors)

    def before_worker_group_shutdown(self, worker_group: WorkerGroup) -> None:
        self._stop()

    def after_worker_group_abort(self, worker_group_context: WorkerGroupContext) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._watcher:
            self._watcher._stop_event.set()
        self._watcher = None
