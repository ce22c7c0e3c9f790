"""Tests of a sweep's handling of the ends of trials, of rungs, and of the number of concurrent trials. They use no Ray."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from undula.elastic.pure.spec import WorkersSpec
from undula.errors import StorageError
from undula.state.events import StartEvent, ValidationEvent
from undula.state.ledger import LedgerWriter
from undula.state.records import StepRow
from undula.storage import Store
from undula.study import sweep
from undula.study.progress import StudyProgress
from undula.study.records import TRIALS, read_outcome
from undula.study.spec import StudySpec
from undula.study.sweep import _max_at_once, _Recorder, _SuccessiveHalving
from undula.study.trials import Measurement, Trial, TrialRecord

SPEC = StudySpec("study", "job.yaml", batches=(10,), base_lrs=(0.1, 0.2), samples=90, scheduler="asha")
TRIAL = Trial(10, 0.1, "none", 0, "own", 0)


def recorder_of(folder: Path, progress: StudyProgress) -> _Recorder:
    return _Recorder(Store(str(folder)), progress, {"1": TRIAL}, lambda _trial, step: 10 * step, lambda _record: None)


def test_divergence_is_judged_by_the_whole_curve_of_a_trial_whose_process_was_lost(tmp_path: Path) -> None:
    store = Store(str(tmp_path)) / TRIALS / TRIAL.name
    ledger = LedgerWriter(store, 1)
    ledger.event(StartEvent(1, 1, step=0))
    for step in range(4):
        ledger.step(StepRow(1, step, 0, 10 * (step + 1), 10, 1, 1.0, 0.1, 0, 1, 0, 0, 0, 100.0 + step))
        ledger.event(ValidationEvent((5.0, 4.0, 1.0, 1.1)[step], 9, step=step + 1))
    ledger.close()
    heard = (Measurement(30, 3, 1.0), Measurement(40, 4, 1.1))  # measured by the replacement process
    progress = StudyProgress(SPEC, {TRIAL: TrialRecord(TRIAL, "running", 0.1, heard)})
    ended = SimpleNamespace(trial_id="1", last_result={"state": "complete", "message": ""})
    recorder_of(tmp_path, progress).on_trial_complete(0, [], ended)
    assert progress.records[TRIAL].state == "complete"
    assert read_outcome(store) == progress.records[TRIAL]

    worse = replace(progress.records[TRIAL], curve=(Measurement(0, 0, 0.5), *progress.records[TRIAL].curve))
    recorder = recorder_of(tmp_path / "other", progress)
    recorder.end(worse)
    assert progress.records[TRIAL].state == "diverged"
    assert progress.records[TRIAL].message == "its loss went from 0.5 to 1.1"
    recorder.end(replace(worse, state="stopped"))
    assert progress.records[TRIAL].state == "diverged", "a trial that ASHA stopped can have diverged"


def test_a_trial_whose_ledger_cannot_be_read_ends_the_sweep_with_the_reason(tmp_path: Path) -> None:
    """Tune turns the exception into another one, whose message is a traceback."""
    (Store(str(tmp_path)) / TRIALS / TRIAL.name).write("ledger/steps-000001-00000.parquet", b"half of a fi")
    progress = StudyProgress(SPEC, {TRIAL: TrialRecord(TRIAL, "running", 0.1)})
    recorder = recorder_of(tmp_path, progress)
    with pytest.raises(StorageError, match=r"steps-000001-00000\.parquet cannot be read") as caught:
        recorder.end(progress.records[TRIAL])
    assert recorder.failure is caught.value
    assert progress.records[TRIAL].state == "running"


def test_a_failed_trial_has_a_reason(tmp_path: Path) -> None:
    progress = StudyProgress(SPEC, {TRIAL: TrialRecord(TRIAL, "running", 0.1)})
    lost: Any = SimpleNamespace(trial_id="1", status="ERROR", get_error=lambda: "trace\nModuleNotFoundError: x\n")
    recorder_of(tmp_path, progress).on_trial_error(0, [], lost)
    assert progress.records[TRIAL].message.endswith("ModuleNotFoundError: x")


def test_a_trial_at_its_last_sample_is_complete_whatever_its_loss() -> None:
    other = replace(TRIAL, base_lr=0.2)
    curve = tuple(Measurement(10 * step, step, 1.0) for step in range(1, 10))
    progress = StudyProgress(SPEC, {TRIAL: TrialRecord(TRIAL, "complete", 0.1, curve)})
    halving = _SuccessiveHalving(progress, {"2": other}, lambda _trial, step: 10 * step)
    this: Any = SimpleNamespace(trial_id="2")
    halving.on_trial_add(None, this)
    losses = [0.5] * 8 + [2.0]
    answers = [
        halving.on_trial_result(None, this, {"done": False, "is_measured": True, "step": step + 1, "loss": loss})
        for step, loss in enumerate(losses)
    ]
    assert set(answers) == {"CONTINUE"}

    late = tuple(Measurement(point.samples, point.step, loss) for point, loss in zip(curve, losses, strict=True))
    progress.records[other] = TrialRecord(other, "running", 0.2, late)
    assert not _SuccessiveHalving(progress, {}, lambda _trial, step: 10 * step).to_stop


@pytest.mark.parametrize(
    ("has", "at_once"),
    [({"CPU": 8.0}, 4), ({"CPU": 1.0}, 1), ({}, 1), ({"CPU": 9.0, "GPU": 4.0}, 4)],
)
def test_as_many_trials_run_as_fit_on_the_cluster_and_at_least_one(
    monkeypatch: pytest.MonkeyPatch, has: dict[str, float], at_once: int
) -> None:
    monkeypatch.setattr(sweep.ray, "cluster_resources", lambda: has)
    assert _max_at_once(SPEC, WorkersSpec(max=2, gpus=0))() == at_once
    assert _max_at_once(replace(SPEC, max_concurrent=1), WorkersSpec(max=2, gpus=0))() == 1


def test_shares_of_a_cpu_are_counted_without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep.ray, "cluster_resources", lambda: {"CPU": 1.0})
    assert _max_at_once(SPEC, WorkersSpec(cpus=0.1, gpus=0))() == 10
