"""Training of a job on workers of a Ray cluster."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from ray.train import TrainingFailedError

from undula import extensions
from undula.config.job import JobSpec, LoadedSpec
from undula.driver.connection import connected, for_workers
from undula.driver.kept_output import KeptOutput
from undula.driver.launch import TrainerName, launch
from undula.driver.preflight import Prepared, on_machines
from undula.driver.record import LaunchSpec
from undula.driver.training import Place, TrainFunction
from undula.elastic.pure.spec import WorkersSpec
from undula.elastic.ray.cluster_gpus import offers_gpus
from undula.elastic.ray.failures import is_superseded, refusal_of, summary, whole_story
from undula.errors import INTERRUPTED, SpecError, StorageError, end_on_sigterm
from undula.state.events import FailEvent, StopEvent
from undula.state.ledger import EventWriter
from undula.storage import Store
from undula.telemetry.hub import HubPublisher, start_hub
from undula.telemetry.live import live_view

CHECKS = "undula.checks"
"""Group of the entry points by which packages add checks of a job on its cluster, before a worker starts: functions of the job and of the
data that its script gives. Each returns a context manager with a function as in `Place.checks`."""
OWN_CHECKS = {"memory": "undula.driver.estimate:estimating"}


def on_cluster(
    loaded: LoadedSpec, trainer: TrainerName
) -> Callable[[LoadedSpec, Prepared], AbstractContextManager[Place]]:
    """Return the function that opens the available Ray cluster for a job.

    Raises:
        SpecError: The trainer does not support the job.
    """
    _refuse(trainer, loaded.spec)

    @contextmanager
    def opened(loaded: LoadedSpec, prepared: Prepared) -> Iterator[Place]:
        store = prepared.store
        with connected():
            loaded = on_machines(loaded, offers_gpus)
            with ExitStack() as beside:
                makers = [extensions.load(CHECKS, OWN_CHECKS, name) for name in extensions.names(CHECKS, OWN_CHECKS)]
                checks = [beside.enter_context(make(loaded, prepared.script_data)) for make in makers]
                hub = start_hub(store)
                output = KeptOutput(store)
                try:
                    with live_view(hub, keep=output.add):
                        fit = partial(_fit, store, hub, trainer)
                        yield Place(loaded, HubPublisher(hub), fit, checks, output.finish)
                finally:
                    output.finish()

    return opened


def _refuse(trainer: TrainerName, spec: JobSpec) -> None:
    """Refuse settings that Ray Train's own trainer does not support."""
    if trainer == "ray" and spec.engine != "torch":
        raise SpecError(f"command line: --trainer ray cannot be combined with engine={spec.engine}; remove one of them")
    if trainer == "ray" and not spec.workers.fleet.is_any:
        raise SpecError("command line: --trainer ray cannot be combined with workers.fleet; remove one of them")


def _fit(store: Store, hub: Any, trainer: TrainerName, train: TrainFunction, spec: LaunchSpec) -> str | None:
    """Train, and return the story of the failure if training failed.

    Raises:
        UndulaError: The workers cannot train on a node of the cluster.
        SystemExit: The driver was stopped from outside. An event in the ledger records this.
    """
    print(f"{store.url}: starting {_description(spec.workers)} ...", flush=True)
    train = for_workers(train)
    end_on_sigterm()  # Ray has replaced the handler when it connected
    try:
        launch(train, spec, store, hub, trainer)
    except TrainingFailedError as error:
        refusal = refusal_of(error)
        if not is_superseded(error):
            with suppress(StorageError):  # which may be the error itself
                EventWriter(store, "driver").event(FailEvent(summary(refusal or error)))
        if refusal:
            raise refusal from None
        return whole_story(error)
    except SystemExit:
        EventWriter(store, "driver").event(StopEvent())
        raise SystemExit(INTERRUPTED) from None  # Ray's handler of SIGINT would end the job with status 0
    return None


def _description(workers: WorkersSpec) -> str:
    """Return the number of workers and of their GPUs in words, such as `1 to 2 workers with 1 GPU each` or `2 workers without a GPU`."""
    sizes = f"{workers.max}" if workers.min == workers.max else f"{workers.min} to {workers.max}"
    gpus, is_plural = workers.per_worker.get("GPU", 0), workers.max > 1
    having = f"with {gpus:g} GPU{'s' if gpus > 1 else ''}{' each' if is_plural else ''}" if gpus else "without a GPU"
    return f"{sizes} worker{'s' if is_plural else ''} {having}"
