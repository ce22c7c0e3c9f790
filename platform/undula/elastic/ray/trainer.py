"""Trainers with the arguments of Ray Train's own, whose workers can join and leave during a run and whose controller sends events."""

import threading
from collections.abc import Callable
from typing import Any, Literal, cast

import ray
from ray.train import DataConfig, ValidationConfig
from ray.train.torch import TorchConfig
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import (
    ENABLE_PREEMPTION_WATCHER_ENV_VAR,
    get_env_vars_to_propagate,
)
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.util import ObjectRefWrapper
from ray.train.v2.api.callback import RayTrainCallback
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.result import Result
from ray.train.v2.torch.torch_trainer import TorchTrainer

from undula.elastic.pure.fleet import FleetManager, Work
from undula.elastic.pure.policy import collective_limit_s
from undula.elastic.pure.spec import WorkersSpec
from undula.elastic.ray.backend import ElasticTorchConfig
from undula.elastic.ray.capacity import Refusals
from undula.elastic.ray.controller import ElasticController
from undula.elastic.ray.environment import variables_of_worker
from undula.elastic.ray.events import ControllerEvents, EventSink, log_event
from undula.elastic.ray.failures import RetryUnlessBug
from undula.elastic.ray.pool import START_TIMEOUT_S, WorkerPool
from undula.elastic.ray.scaling import RUN_NAME
from undula.errors import SpecError
from undula.parallel.engines.library import library_named
from undula.plan.fleet import FleetSpec
from undula.recovery.progress import LONGEST_PHASE_S
from undula.storage import Store
from undula.telemetry.hub import UNRECORDED


class ElasticTrainer(DataParallelTrainer):
    """Base class of the trainers. It takes the arguments of Ray's own trainers and the following ones.

    Args:
        on_event: Function that the controller's process calls with each event, such as a resize or a crash. It must be picklable. By
            default, events go to the logger "undula".
        grow, hang_limit_s: Values of these fields of WorkersSpec.
        prepare: Function that each worker's process calls before it joins its first group, while other workers train.
        fleet: Policy for the nodes that the run requests, as in WorkersSpec. A deadline needs `work`.
        work: Size and start time of the job, which a deadline needs.
        prepare_s: Seconds that a worker may need in addition until it is ready, for example because it compiles the model.

    Raises:
        SpecError: `fleet` has a deadline, and `work` is missing.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        on_event: EventSink = log_event,
        grow: Literal["auto", "always", "never"] = "auto",
        hang_limit_s: float | None = None,
        prepare: Callable[[], None] | None = None,
        fleet: FleetSpec | None = None,
        work: Work | None = None,
        prepare_s: float = 0.0,
        **arguments: Any,
    ):
        super().__init__(train_loop_per_worker, **arguments)
        self._start_timeout_s = START_TIMEOUT_S + prepare_s
        self._on_event = on_event
        self._grow = grow
        self._hang_limit_s = hang_limit_s
        self._prepare = prepare
        self._fleet = fleet or FleetSpec()
        self._work = work
        if self._fleet.deadline and work is None:
            raise SpecError("fleet.deadline needs the job's number of steps and its start; pass work=Work(...)")

    def _initialize_and_run_controller(self, **controller_arguments: Any) -> Result:
        """Run Undula's controller in place of Ray's, without the callbacks that it does not need."""
        kept = [
            callback
            for callback in controller_arguments["callbacks"]
            if not isinstance(callback, self._unneeded_callbacks())
        ]
        controller_arguments["callbacks"] = kept
        controller_arguments["failure_policy"] = RetryUnlessBug(cast(FailureConfig, self.run_config.failure_config))
        del controller_arguments["scaling_policy"]  # the controller creates its own
        env = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0", **get_env_vars_to_propagate()}
        env[ENABLE_PREEMPTION_WATCHER_ENV_VAR] = "0"  # the pool itself observes draining nodes
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        options: dict[str, Any] = {"num_cpus": 0, "label_selector": here, "runtime_env": {"env_vars": env}}
        options["scheduling_strategy"] = (
            "DEFAULT"  # a trial of Ray Tune would otherwise place it in the trial's placement group
        )
        controller_class = ray.remote(**options, **UNRECORDED)(ElasticController)
        pool = self._pool(controller_arguments["train_fn_ref"])
        pool.tick()  # starts the first workers while the controller's process starts
        controller: Any = controller_class.remote(
            scaling_config=self.scaling_config,
            grow=self._grow,
            hang_limit_s=self._hang_limit_s,
            pool=pool,
            **controller_arguments,
        )
        if threading.current_thread() is threading.main_thread():
            self._register_sigint_handler(controller)
        ray.get(controller.run.remote())
        return cast(Result, ray.get(controller.get_result.remote()))

    def _pool(self, train_fn_ref: ObjectRefWrapper[Any]) -> WorkerPool:
        scaling, config = cast(ScalingConfig, self.scaling_config), cast(RunConfig, self.run_config)
        return WorkerPool(
            train_fn_ref=train_fn_ref,
            prepare=self._prepare,
            resources=scaling._resources_per_worker_not_none,
            runtime_env=WorkerGroup._get_worker_runtime_env(config.worker_runtime_env or {}),
            fleet=FleetManager(
                self._fleet,
                scaling.max_workers,
                scaling.min_workers,
                self._work or Work(0, 0.0),
                bool(scaling.use_gpu),
                self._on_event,
                Refusals(),
            ),
            on_event=self._on_event,
            start_timeout_s=self._start_timeout_s,
        )

    def _unneeded_callbacks(self) -> tuple[type[RayTrainCallback], ...]:
        """Return the types of the callbacks whose actors would be idle. An idle actor takes up to 1 % of a core."""
        return (PlacementGroupCleanerCallback, *(() if self.datasets else (DatasetsCallback,)))


class ElasticTorchTrainer(ElasticTrainer, TorchTrainer):
    """TorchTrainer whose number of workers varies within `ScalingConfig(num_workers=(min, max))`; the minimum can be 1.

    It takes the arguments of TorchTrainer, except for deprecated ones, and those of ElasticTrainer. Workers with GPUs start with
    TORCH_NCCL_ASYNC_ERROR_HANDLING=0, so that they survive the loss of another one. A train function that does not use a Run, and that
    torch is to end when a collective takes longer than the timeout of `torch_config`, needs another value in
    `RunConfig(worker_runtime_env=...)`.
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
        **elastic: Any,
    ):
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            torch_config=ElasticTorchConfig(**vars(torch_config or TorchConfig())),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            validation_config=validation_config,
            **elastic,
        )


def scaling_config(workers: WorkersSpec) -> ScalingConfig:
    """Return Ray's ScalingConfig for the workers of a job."""
    return ScalingConfig(
        num_workers=workers.max if workers.min == workers.max else (workers.min, workers.max),
        use_gpu="GPU" in workers.per_worker,
        resources_per_worker=workers.per_worker,
    )


def run_config(workers: WorkersSpec, store: Store) -> RunConfig:
    """Return Ray's RunConfig for a run directory. Ray stores its own files there in the folder `ray`."""
    return RunConfig(
        name=RUN_NAME,
        storage_path=store.path(),
        storage_filesystem=store.filesystem,
        failure_config=FailureConfig(max_failures=workers.max_failures),
    )


def elastic_trainer(
    train_loop_per_worker: Callable[[], Any],
    engine: str,
    engine_settings: Any,
    workers: WorkersSpec,
    work: Work,
    store: Store,
    on_event: EventSink,
    prepare: Callable[[], None],
    prepare_s: float,
) -> ElasticTrainer:
    """Return the trainer of a job: that of the library which its `engine` names, with its settings, or an ElasticTorchTrainer."""
    timeout_s = int(collective_limit_s(workers.hang_limit_s))
    arguments: dict[str, Any] = {
        "scaling_config": scaling_config(workers),
        "run_config": run_config(workers, store),
        "on_event": on_event,
        "grow": workers.grow,
        "hang_limit_s": workers.hang_limit_s,
        "prepare": prepare,
        "prepare_s": prepare_s,
        "fleet": workers.fleet,
        "work": work,
    }
    library = library_named(engine)
    if library is None:
        return ElasticTorchTrainer(train_loop_per_worker, torch_config=TorchConfig(timeout_s=timeout_s), **arguments)
    trainer: ElasticTrainer = library.trainer(train_loop_per_worker, engine_settings, timeout_s, **arguments)
    return trainer


def ray_trainer(
    train_loop_per_worker: Callable[[], Any], workers: WorkersSpec, store: Store, on_event: EventSink
) -> TorchTrainer:
    """Return Ray Train's own elastic trainer, for comparison. It checks for more workers every second.

    Nothing but the time limit of collectives finds a rank that hangs.
    """
    config = run_config(workers, store)
    callbacks: list[Any] = [ControllerEvents(on_event, workers.per_worker)]
    config.callbacks = callbacks
    config.worker_runtime_env = {"env_vars": variables_of_worker(workers.per_worker, is_watched=False)}
    assert config.failure_config is not None
    config.failure_config.max_failures = -1
    scaling = scaling_config(workers)
    scaling.elastic_resize_monitor_interval_s = 1
    torch_config = TorchConfig(timeout_s=int(LONGEST_PHASE_S))
    return TorchTrainer(train_loop_per_worker, torch_config=torch_config, scaling_config=scaling, run_config=config)
