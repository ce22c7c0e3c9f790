"""Undula's trainers: Ray Train's own, with the same arguments, that tell what happens to their workers."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import ray
from ray.train import DataConfig, ValidationConfig
from ray.train.torch import TorchConfig
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import ENABLE_PREEMPTION_WATCHER_ENV_VAR
from ray.train.v2.api.callback import RayTrainCallback
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.result import Result
from ray.train.v2.torch.torch_trainer import TorchTrainer

from undula.elastic.events import ControllerEvents, EventSink, log_event
from undula.elastic.failures import RetryUnlessBug
from undula.elastic.notices import NoticeWatch
from undula.elastic.spec import WorkersSpec
from undula.storage import Store


class ElasticTorchTrainer(TorchTrainer):
    """A TorchTrainer whose workers come and go: `ScalingConfig(num_workers=(min, max))`, a world of one included.

    Takes TorchTrainer's arguments but for those that it deprecates, and `on_event`: called in the controller's process with each
    resize, crash and notice; it must be picklable. By default events go to the logger "undula".
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        validation_config: ValidationConfig | None = None,
        on_event: EventSink = log_event,
    ):
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            torch_config=torch_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            validation_config=validation_config,
        )
        self._on_event = on_event

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Result:
        unneeded = self._unneeded_callbacks()
        callbacks = [each for each in controller_init_kwargs["callbacks"] if not isinstance(each, unneeded)]
        controller_init_kwargs["failure_policy"] = RetryUnlessBug(cast(FailureConfig, self.run_config.failure_config))
        controller_init_kwargs["callbacks"] = [*callbacks, ControllerEvents(self._on_event), NoticeWatch()]
        with _environment(ENABLE_PREEMPTION_WATCHER_ENV_VAR, "0"):  # NoticeWatch does its work
            return cast(Result, super()._initialize_and_run_controller(**controller_init_kwargs))

    def _unneeded_callbacks(self) -> tuple[type[RayTrainCallback], ...]:
        """Those whose actors would only idle beside the training; an idle actor takes up to 1 % of a core."""
        without_datasets = () if self.datasets else (DatasetsCallback,)
        # A placement group goes with its job, so the driver's end is enough; a trial of Tune ends before its job does.
        in_driver = (PlacementGroupCleanerCallback,) if ray.get_runtime_context().get_actor_id() is None else ()
        return (*without_datasets, *in_driver)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    former = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if former is not None:
            os.environ[name] = former


def scaling_config(workers: WorkersSpec) -> ScalingConfig:
    """Ray's ScalingConfig for a job's workers."""
    gpus = {"GPU": workers.gpus} if workers.gpus else {}
    return ScalingConfig(
        num_workers=workers.max if workers.min == workers.max else (workers.min, workers.max),
        use_gpu=workers.gpus > 0,
        resources_per_worker={"CPU": workers.cpus, **gpus, **workers.resources},
        elastic_resize_monitor_interval_s=workers.resize_interval_s,
    )


def run_config(workers: WorkersSpec, store: Store) -> RunConfig:
    """Ray's RunConfig for a run directory; Ray keeps its own notes in its folder `ray`."""
    return RunConfig(
        name="ray",
        storage_path=store.path(),
        storage_filesystem=store.filesystem,
        failure_config=FailureConfig(max_failures=workers.max_failures),
    )
