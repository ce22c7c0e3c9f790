"""Files of a study: its spec, the outcomes of its trials, and the records that are read from the ledgers of the trials."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import inf
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from undula.errors import RunError, StorageError
from undula.plan.rules import RULES
from undula.state.commit import CHECKPOINTS
from undula.state.directory import STUDY_FILE
from undula.state.events import LossEvent, StartEvent, ValidationEvent
from undula.state.heartbeat import HEARTBEAT_FILE
from undula.state.ledger import Ledger, events_of, read_ledger
from undula.storage import Store
from undula.study.spec import StudySpec
from undula.study.trials import Measurement, Trial, TrialRecord

TRIALS = "trials"
"""Folder of the run directories of a study's trials."""
REPORT = "report"
"""Folder of the study's report."""
OUTCOME = "outcome.json"
"""File in the run directory of a trial that has ended."""
EVENT_OF: Mapping[str, type[ValidationEvent | LossEvent]] = {
    "validation_loss": ValidationEvent,
    "training_loss": LossEvent,
}
"""Type of the ledger events that hold the measurements of a metric."""


def write_outcome(store: Store, record: TrialRecord, keeps_models: bool) -> None:
    """Write the outcome of a trial.

    Args:
        store: Run directory of the trial.
        record: Record of the trial, which has ended.
        keeps_models: Whether to keep the trial's checkpoints.
    """
    store.write(OUTCOME, json.dumps(asdict(record), indent=1).encode())
    if not keeps_models:
        store.delete(CHECKPOINTS)


def read_outcome(store: Store) -> TrialRecord | None:
    """Return the record of a trial that has ended, or None if it has not ended.

    Raises:
        RunError: The file is damaged.
    """
    if not store.exists(OUTCOME):
        return None
    try:
        return TypeAdapter(TrialRecord).validate_json(store.read(OUTCOME))
    except ValueError as error:
        text = " ".join(str(error).split())
        raise RunError(f"{store.url}/{OUTCOME} is damaged ({text}); delete it to resume the trial") from error


def read_record(store: Store, spec: StudySpec, trial: Trial) -> TrialRecord:
    """Return the record of a trial. It is the outcome of the trial or, if it has not ended, is read from the ledger.

    Args:
        store: Run directory of the trial, which may not exist yet.
        spec: The study.
        trial: The trial.
    """
    if outcome := read_outcome(store):
        return outcome
    ledger = read_ledger(store)
    if not len(ledger.events):
        return TrialRecord(trial, "waiting", top_rate(spec, trial) or trial.base_lr)
    rates = ledger.steps["lr"].to_numpy()
    lr = top_rate(spec, trial) or (float(rates.max()) if len(rates) else trial.base_lr)
    seconds, worker_seconds = _seconds(ledger)
    return TrialRecord(trial, "running", lr, _curve(spec, ledger), _noise(ledger), seconds, worker_seconds)


def top_rate(spec: StudySpec, trial: Trial) -> float | None:
    """Return the learning rate at the top of a trial's schedule, or None if only the ledger has it because the rule measures its factor."""
    rule = RULES[trial.rule]
    if rule.is_measured and trial.batch != spec.batches[0]:
        return None
    return trial.base_lr * rule.scaled(trial.batch / spec.batches[0], None).lr


def _curve(spec: StudySpec, ledger: Ledger) -> tuple[Measurement, ...]:
    """Return the measurements of the metric.

    A training loss is the mean over the steps since the last measurement. It is computed from the steps of the ledger, because an event
    has only the losses of one group of workers.
    """
    events: list[ValidationEvent | LossEvent] = events_of(ledger.events, EVENT_OF[spec.metric])
    measured = {event.step: event.loss for event in events}  # the newest measurement of a step
    steps = ledger.steps
    done = np.asarray(steps["step"]) + np.asarray(steps["merged_steps"])
    curve, begin = [Measurement(0, 0, measured[0])] if 0 in measured else [], 0
    for step in sorted(measured.keys() - {0}):
        end = int(np.searchsorted(done, step, side="right"))
        if end == begin or done[end - 1] != step:  # the ledger does not have all of these steps yet
            continue
        samples = int(steps["samples"][end - 1].as_py())
        loss = float(measured[step])
        if spec.metric == "training_loss":
            part = slice(begin, end)
            loss = float(np.average(np.asarray(steps["loss"])[part], weights=np.asarray(steps["step_samples"])[part]))
        curve.append(Measurement(samples, step, loss))
        begin = end
    return tuple(curve)


def _noise(ledger: Ledger) -> tuple[tuple[int, float], ...]:
    """Return (consumed samples, gradient noise scale) for each step that measured the scale."""
    rows = zip(ledger.steps["samples"].to_pylist(), ledger.steps["logged"].to_pylist(), strict=True)
    measured = [(samples, json.loads(logged).get("noise_scale")) for samples, logged in rows if "noise_scale" in logged]
    return tuple((int(samples), float(scale)) for samples, scale in measured if scale is not None)


def _seconds(ledger: Ledger) -> tuple[float, float]:
    """Return the seconds, and the seconds times workers, from the start of each group of workers to its last step or event."""
    wall = work = 0.0
    starts = events_of(ledger.events, StartEvent)
    rows = np.concatenate([np.asarray(part["time"]) for part in (ledger.steps, ledger.replaced, ledger.events)])
    for number, start in enumerate(starts):
        until = starts[number + 1].time if number + 1 < len(starts) else inf
        within = rows[(rows >= start.time) & (rows < until)]
        seconds = float(within.max(initial=start.time) - start.time)  # the clocks of nodes may differ
        wall += seconds
        work += seconds * start.world_size
    return wall, work


def write_study(study: Store, body: dict[str, Any]) -> None:
    """Write study.json, which has the study as it was submitted."""
    study.write(STUDY_FILE, json.dumps(body, indent=1).encode())


def read_spec(study: Store) -> StudySpec:
    """Read a study's spec from its directory.

    Raises:
        RunError: The directory has no study, or the file is damaged.
    """
    try:
        return TypeAdapter(StudySpec).validate_python(json.loads(study.read(STUDY_FILE))["spec"])
    except StorageError:
        raise RunError(
            f"{study.url} has no study; give the directory of a study, or its name and the parent folder with --runs"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        text = " ".join(str(error).split())
        raise RunError(
            f"{study.url}/{STUDY_FILE} is damaged ({text}); submit the study again to rewrite the file"
        ) from None


def reset_failures(study: Store, records: Iterable[TrialRecord]) -> int:
    """Delete the outcomes of failed trials, so that they resume. The user may have fixed the script since they failed.

    Returns:
        Number of failed trials.
    """
    failed = [record.trial.name for record in records if record.state == "failed"]
    for name in failed:
        (study / TRIALS / name).delete(OUTCOME)
    return len(failed)


def delete_study(study: Store) -> None:
    """Delete the files of a study, but no other files in its directory.

    Raises:
        RunError: The directory has other files and no study.
    """
    names = {entry.name.partition("/")[0] for entry in study.list()} - {".lock"}
    if names and STUDY_FILE not in names:
        raise RunError(
            f"{study.url} has {sorted(names)[0]!r} but no study, and --fresh only deletes studies; give the study another name"
        )
    # STUDY_FILE is deleted last: if the deletion is interrupted, the directory still counts as a study.
    for name in (TRIALS, REPORT, HEARTBEAT_FILE, STUDY_FILE):
        study.delete(name)
