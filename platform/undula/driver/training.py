"""Training of one job, as its driver goes through it: checks, record, launch, and what is printed of the result."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from undula.config.job import LoadedSpec
from undula.driver.preflight import Prepared, prepare
from undula.driver.record import LaunchSpec, record_job
from undula.driver.trackers import Tracking, send_rest
from undula.errors import FAILED, UsageError
from undula.plan.plan import Plan
from undula.report.text import counted
from undula.state.defaults import default_runs
from undula.state.directory import FILES, delete_run, held
from undula.state.events import EndEvent, Event, ValidationEvent
from undula.state.ledger import last_event, read_ledger, steps_done
from undula.storage import open_store
from undula.telemetry.event_recorder import EventRecorder
from undula.telemetry.messages import Publisher
from undula.telemetry.tracker import Tracker
from undula.train.run import Run

TrainFunction: TypeAlias = Callable[[Run], None]
_finished: set[str] = set()
"""Run directories of the jobs that this process has trained."""


@dataclass(frozen=True)
class Place:
    """Where a job trains, as long as it is open."""

    loaded: LoadedSpec
    """The job, with numbers in place of the values that depend on the machines."""
    publish: Publisher
    """Function that shows messages to the user."""
    fit: Callable[[TrainFunction, LaunchSpec], str | None]
    """Function that trains, and returns the story of the failure if training failed."""
    checks: Sequence[Callable[[], Event | None]] = ()
    """Functions that check the job for this place, and return what they have found for the ledger, or refuse the job."""
    keep: Callable[[str], None] = lambda _text: None
    """Function that keeps a text in the run directory, below what the workers have printed."""


def train_job(
    loaded: LoadedSpec,
    train: TrainFunction,
    open_place: Callable[[LoadedSpec, Prepared], AbstractContextManager[Place]],
    fresh: bool,
    trackers: Sequence[Tracker],
) -> None:
    """Check a job, train it, and print the result and the run directory.

    Args:
        loaded: The job.
        train: Train function of the script.
        open_place: Function that opens the place where the job trains, given the job and what its checks have found.
        fresh: Whether to delete the run in the run directory and start over.
        trackers: Experiment trackers of the script, beside those of the job.

    Raises:
        UndulaError: The job is invalid, or cannot be trained there.
        SystemExit: The training failed, or the driver was stopped.
    """
    prepared = prepare(loaded, train, fresh)
    store, trackers = prepared.store, (*prepared.trackers, *trackers)
    if prepared.is_finished:
        if store.url in _finished:
            raise UsageError(
                f"undula.main() was called twice in one script, and the second call continues the run {store.url} of the first, which is "
                "finished; train one model in a script"
            )
        with held(store):
            _print_unsent(send_rest(trackers, store))
        print(f"{store.url} is finished, so there is nothing to do; give --fresh to delete the run and start over")
        return
    _print_early_end(prepared.plan)
    with held(store):
        with open_place(loaded, prepared) as place:
            found = [check() for check in place.checks]
            if fresh:
                delete_run(store)
            spec = record_job(place.loaded, prepared.plan, store, prepared.script_data)
            record = EventRecorder(store, place.publish)
            for event in filter(None, found):
                record(event)
            with Tracking(trackers, store, record) as tracking:
                failure = place.fit(train, spec)
        _print_unsent(tracking.unsent)
        result = _result(prepared, failure)
        print(result, flush=True)
        if failure:
            failure = f"training failed:\n{failure}"
            print(failure, file=sys.stderr, flush=True)
        place.keep(f"{result}\n{failure or ''}")
        if failure:
            raise SystemExit(FAILED)
        _finished.add(store.url)


def _print_early_end(plan: Plan) -> None:
    """Print a line if the epochs end before the steps that the job asks for."""
    if (wanted := plan.spec.max_steps or 0) > plan.total_steps:
        steps = counted(plan.total_steps, "step")
        print(
            f"plan.epochs is {plan.spec.epochs}, so the run ends after {steps}, before the {wanted:,} of plan.max_steps",
            flush=True,
        )


def _result(prepared: Prepared, failure: str | None) -> str:
    """Return how training ended, the last validation loss, and the run directory."""
    store = prepared.store
    ledger = read_ledger(store)
    done, total = steps_done(ledger.steps), prepared.plan.total_steps
    end = last_event(ledger.events, EndEvent)
    result = f"{'failed' if failure else 'stopped'} after {done} of {total} steps"
    if not failure and (done == total or (end and end.step == done)):
        result = "finished" + (f" after {done} of {total} steps ({end.reason})" if end and end.reason else "")
    validation = last_event(ledger.events, ValidationEvent)
    loss = f"validation loss {validation.loss:.4f} at step {validation.step}" if validation else "no validation"
    files = store / FILES
    written = f"files that the script wrote: {files.url}\n" if files.list() else ""
    folder, _, name = store.url.rpartition("/")
    run = name if folder == open_store(default_runs()).url.rstrip("/") else store.url
    return f"{result}: {loss}\n{written}run directory: {store.url}\nlook at it: undula show {run}"


def _print_unsent(sentences: Sequence[str]) -> None:
    """Print what trackers lack."""
    for sentence in sentences:
        print(sentence, flush=True)
