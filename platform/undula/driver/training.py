"""Training of one job, as its driver goes through it: checks, record, launch, and what is printed of the result."""

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from ray.train import TrainingFailedError

from undula.config.job import JobSpec, LoadedSpec
from undula.driver.connection import connected, for_workers
from undula.driver.launch import LaunchSpec, TrainerName, launch, record_job
from undula.driver.preflight import Prepared, on_cluster, prepare
from undula.driver.trackers import Tracking, send_rest
from undula.elastic.pure.spec import WorkersSpec
from undula.elastic.ray.failures import is_superseded, refusal_of, summary, whole_story
from undula.errors import FAILED, INTERRUPTED, SpecError, StorageError
from undula.state.directory import FILES, delete_run, held
from undula.state.events import EndEvent, FailEvent, StopEvent, ValidationEvent
from undula.state.ledger import EventWriter, last_event, read_ledger, steps_done
from undula.storage import Store
from undula.telemetry.hub import EventRecorder, HubPublisher, start_hub
from undula.telemetry.live import live_view
from undula.telemetry.tracker import Tracker
from undula.train.run import Run

TrainFunction: TypeAlias = Callable[[Run], None]


def train_job(
    loaded: LoadedSpec, train: TrainFunction, trainer: TrainerName, fresh: bool, trackers: Sequence[Tracker]
) -> None:
    """Check a job, train it on the available Ray cluster, and print the result and the run directory.

    Args:
        loaded: The job.
        train: Train function of the script.
        trainer: Name of the trainer.
        fresh: Whether to delete the run in the run directory and start over.
        trackers: Experiment trackers of the script, beside those of the job.

    Raises:
        UndulaError: The job is invalid, or the cluster cannot train it.
        SystemExit: The training failed, or the driver was stopped.
    """
    _refuse_trainer(trainer, loaded.spec)
    prepared = prepare(loaded, train, fresh)
    store, trackers = prepared.store, (*prepared.trackers, *trackers)
    if prepared.is_finished:
        with held(store):
            _print_unsent(send_rest(trackers, store))
        print(f"{store.url} is finished, so there is nothing to do; give --fresh to delete the run and start over")
        return
    with held(store), connected():
        loaded = on_cluster(loaded)
        hub = start_hub(store)
        if fresh:
            delete_run(store)
        spec = record_job(loaded, prepared.plan, store, prepared.script_data)
        print(f"{store.url}: starting {_description(spec.workers)} ...", flush=True)
        with live_view(hub), Tracking(trackers, store, EventRecorder(store, HubPublisher(hub))) as tracking:
            error = _fit(train, spec, store, hub, trainer)
        _print_unsent(tracking.unsent)
        _print_result(prepared, error)
        if error:
            raise SystemExit(FAILED)


def _refuse_trainer(trainer: TrainerName, spec: JobSpec) -> None:
    """Refuse settings that Ray Train's own trainer does not support."""
    if trainer == "ray" and spec.engine == "horovod":
        raise SpecError("command line: --trainer ray cannot be combined with engine=horovod; remove one of them")
    if trainer == "ray" and not spec.workers.fleet.is_any:
        raise SpecError("command line: --trainer ray cannot be combined with workers.fleet; remove one of them")


def _fit(train: TrainFunction, spec: LaunchSpec, store: Store, hub: Any, trainer: TrainerName) -> Exception | None:
    """Train, and return the error with which training failed; None if it succeeded.

    Raises:
        UndulaError: The workers cannot train on a node of the cluster.
        SystemExit: The driver was stopped from outside. An event in the ledger records this.
    """
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
        return error
    except SystemExit:
        EventWriter(store, "driver").event(StopEvent())
        raise SystemExit(INTERRUPTED) from None  # Ray's handler of SIGINT would end the job with status 0
    return None


def end_on_sigterm() -> None:
    """End this process with an exception on SIGTERM, so that blocks clean up: the secrets of a stopped job must not stay on the head."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))


def _description(workers: WorkersSpec) -> str:
    """Return the number of workers and of their GPUs in words, such as `1 to 2 workers with 1 GPU each` or `2 workers without a GPU`."""
    sizes = f"{workers.max}" if workers.min == workers.max else f"{workers.min} to {workers.max}"
    gpus, is_plural = workers.per_worker.get("GPU", 0), workers.max > 1
    having = f"with {gpus:g} GPU{'s' if gpus > 1 else ''}{' each' if is_plural else ''}" if gpus else "without a GPU"
    return f"{sizes} worker{'s' if is_plural else ''} {having}"


def _print_result(prepared: Prepared, error: Exception | None) -> None:
    """Print how training ended, the last validation loss, the run directory, and why training failed if it did."""
    store = prepared.store
    ledger = read_ledger(store)
    done, total = steps_done(ledger.steps), prepared.plan.total_steps
    end = last_event(ledger.events, EndEvent)
    result = f"{'failed' if error else 'stopped'} after {done} of {total} steps"
    if not error and (done == total or (end and end.step == done)):
        result = "finished" + (f" after {done} of {total} steps ({end.reason})" if end and end.reason else "")
    validation = last_event(ledger.events, ValidationEvent)
    loss = f"validation loss {validation.loss:.4f} at step {validation.step}" if validation else "no validation"
    files = store / FILES
    written = f"files that the script wrote: {files.url}\n" if files.list() else ""
    print(f"{result}: {loss}\n{written}run directory: {store.url}\nundula show {store.url}", flush=True)
    if error:
        print(f"training failed:\n{whole_story(error)}", file=sys.stderr, flush=True)


def _print_unsent(sentences: Sequence[str]) -> None:
    """Print what trackers lack."""
    for sentence in sentences:
        print(sentence, flush=True)
