"""Launch of training, for jobs and for trials of studies, with the trainer that runs it."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias, assert_never

from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from undula.driver.record import LaunchSpec
from undula.elastic.ray.trainer import elastic_trainer, ray_trainer
from undula.elastic.worker import JobWorker, preparation_s, prepare_worker
from undula.state.heartbeat import keep_heartbeat
from undula.storage import Store
from undula.telemetry.event_recorder import EventRecorder
from undula.telemetry.hub import HubPublisher
from undula.train.run import Run
from undula.train.script_file import ScriptFile

TrainerName: TypeAlias = Literal["undula", "ray"]


def launch(
    train: Callable[[Run], None],
    spec: LaunchSpec,
    store: Store,
    hub: Any,
    trainer_name: TrainerName = "undula",
) -> None:
    """Train on workers of the cluster until the plan is finished.

    Args:
        train: Train function of the script.
        spec: Parameters of the training.
        store: Run directory.
        hub: Handle of the actor that receives the messages of the workers and the controller.
        trainer_name: Name of the trainer; `ray` is Ray Train's own, for comparison.

    Raises:
        TrainingFailedError: The training failed and cannot continue.
    """
    if isinstance(train, ScriptFile):  # whose execution enters a working directory
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    publish = HubPublisher(hub)
    worker, on_event = JobWorker(train, spec.job, publish), EventRecorder(store, publish)
    trainer: DataParallelTrainer
    match trainer_name:
        case "ray":
            trainer = ray_trainer(worker, spec.workers, store, on_event)
        case "undula":
            prepare = partial(prepare_worker, spec.job, publish, spec.workers.interfaces)
            trainer = elastic_trainer(
                worker,
                spec.job.engine,
                spec.engine_settings,
                spec.workers,
                spec.work,
                store,
                on_event,
                prepare=prepare,
                prepare_s=preparation_s(spec.job),
            )
        case _:
            assert_never(trainer_name)
    with keep_heartbeat(store):
        trainer.fit()
