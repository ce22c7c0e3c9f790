"""What has come of a study's trials, read from their run directories, and what the study itself writes there."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from math import inf
from typing import Any

import numpy as np
import pyarrow.compute as pc
from pydantic import TypeAdapter

from undula.errors import RunError, StorageError
from undula.plan.rules import RULES
from undula.state.commit import CHECKPOINTS
from undula.state.directory import STUDY_FILE
from undula.state.ledger import Ledger, read_ledger
from undula.storage import Store
from undula.study.spec import StudySpec
from undula.study.trials import Measurement, Trial, TrialRecord
from undula.study.under_way import UNDER_WAY_FILE

TRIALS = "trials"
REPORT = "report"
OUTCOME = "outcome.json"
EVENT_OF = {"validation_loss": "validation", "training_loss": "loss"}


def write_outcome(store: Store, record: TrialRecord, keeps_models: bool) -> None:
    """Say in a trial's run directory that it has ended, and how; its checkpoints go where nobody wants them."""
    store.write(OUTCOME, json.dumps(asdict(record), indent=1).encode())
    if not keeps_models:
        store.delete(CHECKPOINTS)


def read_outcome(store: Store) -> TrialRecord | None:
    """A trial that has ended; None where it has not.

    Raises:
        RunError: the file is damaged.
    """
    if not store.exists(OUTCOME):
        return None
    try:
        return TypeAdapter(TrialRecord).validate_json(store.read(OUTCOME))
    except ValueError as error:
        text = " ".join(str(error).split())
        raise RunError(f"{store.url}/{OUTCOME} is damaged ({text}): delete it, and the trial goes on") from error


def read_record(store: Store, spec: StudySpec, trial: Trial) -> TrialRecord:
    """A trial from its run directory, which may not be there yet; while it trains, from its ledger."""
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
    """The learning rate at the top of a trial's schedule; None where the rule measures, so that the ledger has to tell."""
    rule = RULES[trial.rule]
    if rule.is_measured and trial.batch != spec.batches[0]:
        return None
    return trial.base_lr * rule.scaled(trial.batch / spec.batches[0], None).lr


def _curve(spec: StudySpec, ledger: Ledger) -> tuple[Measurement, ...]:
    """The metric where it was measured. The training loss is the mean since the last place, whatever group of workers told of it."""
    events = ledger.events.filter(pc.equal(ledger.events["kind"], EVENT_OF[spec.metric])).to_pylist()
    told = {int(event["step"]): json.loads(event["data"])["loss"] for event in events}  # the newest, where done again
    steps = ledger.steps
    done = np.asarray(steps["step"]) + np.asarray(steps["merged_steps"])
    curve, begin = [Measurement(0, 0, told[0])] if 0 in told else [], 0
    for step in sorted(told.keys() - {0}):
        end = int(np.searchsorted(done, step, side="right"))
        if end == begin or done[end - 1] != step:  # the rows of its steps have not reached storage
            continue
        samples = int(steps["samples"][end - 1].as_py())
        loss = float(told[step])
        if spec.metric == "training_loss":
            part = slice(begin, end)
            loss = float(np.average(np.asarray(steps["loss"])[part], weights=np.asarray(steps["step_samples"])[part]))
        curve.append(Measurement(samples, step, loss))
        begin = end
    return tuple(curve)


def _noise(ledger: Ledger) -> tuple[tuple[int, float], ...]:
    rows = zip(ledger.steps["samples"].to_pylist(), ledger.steps["logged"].to_pylist(), strict=True)
    told = [(samples, json.loads(logged).get("noise_scale")) for samples, logged in rows if "noise_scale" in logged]
    return tuple((int(samples), float(scale)) for samples, scale in told if scale is not None)


def _seconds(ledger: Ledger) -> tuple[float, float]:
    """On the wall clock, and times the workers, from each group's start to its last step or event."""
    wall = work = 0.0
    starts: list[dict[str, Any]] = ledger.events.filter(pc.equal(ledger.events["kind"], "start")).to_pylist()
    rows = np.concatenate([np.asarray(part["time"]) for part in (ledger.steps, ledger.replaced, ledger.events)])
    for number, start in enumerate(starts):
        until = starts[number + 1]["time"] if number + 1 < len(starts) else inf
        within = rows[(rows >= start["time"]) & (rows < until)]
        seconds = float(within.max(initial=start["time"]) - start["time"])  # nodes' clocks may differ
        wall += seconds
        work += seconds * json.loads(start["data"])["world_size"]
    return wall, work


def write_study(study: Store, body: dict[str, Any]) -> None:
    """study.json: what was asked for."""
    study.write(STUDY_FILE, json.dumps(body, indent=1).encode())


def read_spec(study: Store) -> StudySpec:
    """What a study's directory says that was asked for.

    Raises:
        RunError: there is no study, or the file is damaged.
    """
    try:
        return TypeAdapter(StudySpec).validate_python(json.loads(study.read(STUDY_FILE))["spec"])
    except StorageError:
        raise RunError(
            f"{study.url} holds no study: give the directory of one, or the name of one in ~/undula/runs"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        text = " ".join(str(error).split())
        raise RunError(
            f"{study.url}/{STUDY_FILE} is damaged ({text}): run the study again, which writes it anew"
        ) from None


def forget_failures(study: Store, records: Iterable[TrialRecord]) -> int:
    """Let trials that failed go on, as whoever submits a study again may have mended the script; how many there are."""
    failed = [record.trial.name for record in records if record.state == "failed"]
    for name in failed:
        (study / TRIALS / name).delete(OUTCOME)
    return len(failed)


def forget_study(study: Store) -> None:
    """Delete a study: what was put into its directory, and nothing else. RunError where the directory holds other things alone."""
    names = {entry.name.partition("/")[0] for entry in study.list()} - {".lock"}
    if names and STUDY_FILE not in names:
        raise RunError(
            f"{study.url} holds {sorted(names)[0]!r} and no study: --fresh deletes studies alone; give another name"
        )
    # By the last it is still known for a study where this is cut short.
    for name in (TRIALS, REPORT, UNDER_WAY_FILE, STUDY_FILE):
        study.delete(name)
