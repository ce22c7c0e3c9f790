"""Tests of the private API of Ray Train that undula.elastic uses. Check every import of ray.train.v2 in
platform/undula/elastic when the newest version of Ray changes."""

import inspect

import ray
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def test_the_overridden_private_api_exists() -> None:
    assert "callbacks" in inspect.getsource(DataParallelTrainer.fit)
    assert list(inspect.signature(DataParallelTrainer._initialize_and_run_controller).parameters) == [
        "self",
        "controller_init_kwargs",
    ]
    assert WorkerGroup._assign_worker_ranks
    assert "print_to_stdstream(" in inspect.getsource(ray._private.worker.listen_error_messages)
    assert TrainController.worker_group_cls is WorkerGroup
    create = inspect.signature(WorkerGroup.create).parameters
    assert list(create) == ["train_run_context", "worker_group_context", "callbacks"]
    for name in ("_poll_workers", "_step", "_shutdown"):
        assert inspect.iscoroutinefunction(getattr(TrainController, name)), name
    for name in ("poll_status", "init_train_context", "run_train_fn", "shutdown", "get_metadata", "mark_preempt"):
        assert hasattr(RayTrainWorker, name), name
    assert list(inspect.signature(ControllerCallback.after_controller_state_update).parameters) == [
        "self",
        "previous_state",
        "current_state",
    ]
