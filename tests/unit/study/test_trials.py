"""Tests of trials: the target, the records that are read from their ledgers, and their reports during training."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.errors import RunError
from undula.plan.plan import Plan, PlanSpec
from undula.state import heartbeat
from undula.state.events import CheckpointEvent, LossEvent, StartEvent, ValidationEvent
from undula.state.heartbeat import (
    HEARTBEAT_FILE,
    SILENCE_S,
    Heartbeat,
    has_driver,
    keep_heartbeat,
    refuse_another_driver,
)
from undula.state.ledger import LedgerWriter
from undula.state.processes import ProcessIdentity, identity_of, own_identity
from undula.state.records import StepRow
from undula.storage import Store
from undula.study import progress
from undula.study.live_table import best_of, fewest_steps, seconds_left, study_table
from undula.study.process import Listener, TrialUpdate
from undula.study.records import OUTCOME, read_outcome, read_record, read_spec, write_outcome
from undula.study.spec import StudySpec
from undula.study.trials import Measurement, Trial, TrialRecord, reached, trial_row
from undula.telemetry.messages import Status

SPEC = StudySpec("study", "job.yaml", batches=(10, 20), base_lrs=(0.1, 0.2), samples=40, target=1.0)
TRIAL = Trial(10, 0.1, "none", 0, "own", 0)


def curve(*losses: float) -> tuple[Measurement, ...]:
    return tuple(Measurement(10 * step, step, loss) for step, loss in enumerate(losses))


def record(*losses: float, state: str = "complete", batch: int = 10, lr: float = 0.1, seed: int = 0) -> TrialRecord:
    trial = replace(TRIAL, batch=batch, base_lr=lr, seed=seed)
    return TrialRecord(trial, state, lr, curve(*losses), seconds=2.0)  # type: ignore[arg-type]


def test_the_target_is_reached_by_linear_interpolation_between_measurements() -> None:
    assert reached(curve(3, 2, 0), 1) == (15, 1.5)
    assert record(3, 2, 0).steps_to(1) == 2
    assert reached(curve(3, 2, 1.5), 1) == (inf, inf)
    assert record(3, 2, 1.5).steps_to(1) == inf
    assert reached(curve(0.5), 1) == (0, 0)
    assert reached(curve(nan, 0.5), 1) == (10, 1)
    assert record(3, 0.5, nan, state="diverged").steps_to(1) == inf


@pytest.mark.parametrize("steps", [3, 7, 60])
def test_short_steps_at_the_end_of_an_epoch_count_as_steps(steps: int) -> None:
    plan = Plan(PlanSpec(global_batch=600, virtual_workers=1, epochs=100), 1000)  # steps of 600 and 400 samples
    every_step = tuple(
        Measurement(plan.step(done).samples_before, done, 2.0 - done / steps) for done in range(steps + 1)
    )
    assert replace(record(batch=600), curve=every_step).steps_to(1.0) == steps
    ends = replace(record(batch=600), curve=(every_step[0], every_step[-1]))
    assert ends.steps_to(1.5) == -(-steps // 2), "between two measurements"


def test_the_records_of_several_trials_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPEC, base_lrs=tuple(0.1 * (1 + number) for number in range(progress.READERS // 2)))
    together, read = threading.Barrier(progress.READERS, timeout=60), progress.read_record

    def read_with_others(store: Store, spec: StudySpec, trial: Trial) -> TrialRecord:
        together.wait()
        return read(store, spec, trial)

    monkeypatch.setattr(progress, "read_record", read_with_others)
    found = progress.read_progress(Store(str(tmp_path)), spec).records
    assert [record.trial for record in found.values()] == list(found)
    assert {record.state for record in found.values()} == {"waiting"}


@pytest.mark.parametrize(
    ("losses", "has_diverged"),
    [
        ((3, 1, 5), True),
        ((3, 1, 4), False),  # the rise is small relative to the first loss
        ((-3, -2, -1), True),
        ((-3, -2, -2.9), False),
        ((0.02, -1, 0.031), False),  # the rise is small relative to the decrease
        ((0, 0), False),
        ((3, nan, 1), True),
        ((3, 4, 2), False),
        ((), False),
    ],
)
def test_a_curve_that_ends_far_above_its_beginning_has_diverged(losses: tuple[float, ...], has_diverged: bool) -> None:
    assert record(*losses).has_diverged == has_diverged


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.floats(0, 10), st.floats(0, 10))
def test_a_lower_target_is_not_reached_earlier(losses: list[float], one: float, other: float) -> None:
    points = curve(*losses)
    assert reached(points, min(one, other)) >= reached(points, max(one, other))


def row(step: int, loss: float, attempt: int = 1, **values: object) -> StepRow:
    base = StepRow(attempt, step, 0, 10 * (step + 1), 10, 2, loss, 0.1, 0, 1, 0, 0, 0, 100.0 + step)
    return replace(base, **values)  # type: ignore[arg-type]


def written(folder: Path) -> Store:
    """Write a run of three steps with a measurement after each, the last of which was made twice."""
    store = Store(str(folder))
    ledger = LedgerWriter(store, 1)
    ledger.event(StartEvent(2, 1, step=0, time=99.0))
    for step, loss in enumerate((5.0, 4.0, 3.0)):
        ledger.step(row(step, loss, logged='{"noise_scale": 7.5}' if step == 1 else "{}"))
        ledger.event(ValidationEvent(loss - 1, 9, step=step + 1, time=100.0 + step))
    ledger.event(ValidationEvent(1.5, 9, step=3, time=103.0))
    ledger.close()
    return store


def test_a_running_trial_is_read_from_its_ledger(tmp_path: Path) -> None:
    assert read_record(Store(str(tmp_path)), SPEC, TRIAL).state == "waiting"
    found = read_record(written(tmp_path), SPEC, TRIAL)
    assert found.state == "running"
    assert found.curve == (Measurement(10, 1, 4.0), Measurement(20, 2, 3.0), Measurement(30, 3, 1.5))
    assert found.noise == ((20, 7.5),)
    assert (found.seconds, found.worker_seconds) == (4.0, 8.0)


def test_a_training_loss_is_the_mean_since_the_last_measurement(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    ledger = LedgerWriter(store, 1)
    ledger.event(StartEvent(1, 1, step=0))
    for step, loss in enumerate((5.0, 4.0, 3.0, 2.0)):
        ledger.step(row(step, loss))
    for step in (2, 4):
        ledger.event(LossEvent(99.0, 9, step=step))  # from a group that has only some of the steps
    ledger.close()
    found = read_record(store, replace(SPEC, metric="training_loss"), TRIAL)
    assert [point.loss for point in found.curve] == [4.5, 2.5]


def test_an_outcome_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = written(tmp_path)
    ended = replace(record(3, inf, state="diverged"), noise=((1, 2.0),), message="its loss was inf")
    write_outcome(store, ended, keeps_models=False)
    assert read_outcome(store) == read_record(store, SPEC, TRIAL) == ended


def test_a_damaged_file_is_named_with_the_fix(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write(OUTCOME, b"{")
    with pytest.raises(RunError, match=r"outcome\.json is damaged .*delete it to resume the trial"):
        read_outcome(store)
    with pytest.raises(RunError, match="has no study; give the directory of a study"):
        read_spec(store)


def heard(*messages: object, error: str | None = None) -> list[TrialUpdate]:
    updates: list[TrialUpdate] = []
    listener = Listener("validation_loss", updates.append)
    for message in messages:
        listener(message)  # type: ignore[arg-type]
    listener.ended(error)
    return updates


def measured(step: int, loss: float) -> ValidationEvent:
    return ValidationEvent(loss, 9, step=step)


def test_a_trial_reports_its_measurements_and_its_end() -> None:
    updates = heard(measured(0, 3.0), CheckpointEvent(1.0, step=1), measured(2, 1.0))
    assert [(news.step, news.loss, news.is_measured, news.state) for news in updates] == [
        (0, 3.0, True, "running"),
        (2, 1.0, True, "running"),
        (2, 1.0, False, "complete"),
    ]
    assert heard(measured(0, 3.0), error="KeyError: 'x'")[-1].message == "KeyError: 'x'"


@pytest.mark.parametrize(
    ("messages", "state"),
    [
        (
            [measured(0, 3.0), measured(1, 4.0)],
            "complete",
        ),  # the whole curve of the trial decides, and this may be only its end
        ([measured(0, 3.0), measured(1, nan), measured(2, 1.0)], "diverged"),
        ([measured(0, 3.0), Status(1, 9, inf, 0.1, 1.0, 1, 1.0), measured(2, 1.0)], "diverged"),
        ([measured(0, 3.0), Status(1, 9, 2.0, 0.1, 1.0, 1, 1.0), measured(2, 1.0)], "complete"),
    ],
)
def test_a_loss_that_is_not_finite_counts_as_divergence(messages: list[object], state: str) -> None:
    ends = [news.state for news in heard(*messages) if news.state != "running"]
    assert ends == [state]


def test_a_diverged_trial_in_this_process_ends_after_its_run_has_stopped() -> None:
    updates: list[object] = []
    listener = Listener("validation_loss", updates.append, lambda: updates.append("leaves"))
    for message in (measured(0, 3.0), measured(1, nan), measured(2, 1.0)):
        listener(message)
    assert updates[1:] == ["leaves"]
    listener.ended(None)
    assert [news.state for news in updates[2:]] == ["diverged"]  # type: ignore[attr-defined]


def test_the_time_left_follows_the_pace_of_each_batch() -> None:
    done, slow = record(3, 2, 2, 2, 2), replace(record(3, 2, 2, 2, 2, batch=20), seconds=20.0)
    waiting = [record(state="waiting"), record(state="waiting", batch=20)]
    assert seconds_left(SPEC, [done, slow, *waiting]) == pytest.approx(22.0)
    assert seconds_left(SPEC, waiting) is None


def test_the_best_rate_has_the_lowest_mean_loss_over_seeds() -> None:
    pair = [record(3, 2, lr=0.1), record(3, 1, lr=0.2), record(3, inf, lr=0.2, seed=1, state="diverged")]
    assert best_of(pair) == (0.1, 2)
    assert best_of([record(3, 1, state="stopped")]) is None
    assert best_of([record(3, 2), record(3, 4.5, seed=1)]) is None, (
        "the mean of the last losses is above that of the first ones"
    )
    assert best_of([record(3, 1), record(3, 1, seed=1, state="stopped"), record(3, 2, lr=0.2)]) == (0.2, 2)
    measured = [
        replace(record(3, loss, lr=lr), trial=replace(TRIAL, rule="surge", seed=seed))
        for seed, loss, lr in ((0, 1, 0.3), (1, 2, 0.4))
    ]
    assert best_of(measured) == (pytest.approx(0.35), 1.5), "a measured rule gives each seed its own rate"


def test_the_table_compares_rates_over_the_seeds_that_all_of_them_have() -> None:
    first = [record(3, 2, lr=0.1), record(3, 1, lr=0.2)]
    later = record(3, 2.9, lr=0.2, seed=1)  # 0.2 is the better rate, but its mean over both seeds is no better than 0.1
    assert best_of([*first, later]) == (0.2, 1)
    assert fewest_steps([*first, later], 2) == 1
    assert best_of([*first, later, record(3, 2.8, lr=0.1, seed=1)]) == (0.2, 1.95)


def test_the_fewest_steps_are_means_over_seeds_that_all_reach_the_target() -> None:
    slow, fast, never = record(3, 2, 1), record(3, 1, 1, seed=1), record(3, 2, 2, lr=0.2)
    assert fewest_steps([slow, fast], 1) == pytest.approx((slow.steps_to(1) + fast.steps_to(1)) / 2)
    assert fewest_steps([slow, fast, never, record(3, 0.5, lr=0.2, seed=1)], 1) == fewest_steps([slow, fast], 1)
    assert fewest_steps([never], 1) is None
    assert fewest_steps([slow, record(3, 3, seed=1, state="running")], 1) == slow.steps_to(1)
    assert fewest_steps([slow, record(3, 9, seed=1, state="diverged")], 1) is None


def test_the_table_fits_and_its_frame_marks_its_start_and_end() -> None:
    text = study_table(SPEC, [record(3, 0.5), record(3, state="running", batch=20), record(state="waiting", lr=0.2)])
    lines = text.split("\n")
    assert (lines[0][0], lines[-1][0]) == ("┏", "└")
    assert all(len(line) <= 100 for line in lines)
    assert "study: 1 of 3 trials, 1 running" in lines[-1]


def test_the_table_has_a_column_for_each_state_of_lost_trials() -> None:
    spec = replace(SPEC, optimizers=("adamw", "sgd"), rules=("none", "sqrt"), warmups=(0, 1000))
    states = ("complete", "diverged", "diverged", "stopped")
    records = [record(3, 0.5, state=state, lr=0.1 * (at + 1)) for at, state in enumerate(states)]
    text = study_table(spec, [*records, replace(records[0], trial=replace(TRIAL, optimizer="adamw", rule="sqrt"))])
    head, row = text.split("\n")[1], text.split("\n")[3]
    assert all(name in head for name in ("optimizer", "rule", "stopped", "diverged", "best rate", "steps to 1"))
    assert "failed" not in head
    assert [cell.strip() for cell in row.split("│")][-3:-1] == ["1", "2"]


def test_a_study_without_a_driver_has_no_time_left() -> None:
    records = [record(3, 0.5), record(3, state="waiting", batch=20)]
    assert "study: 1 of 2 trials, not running" in study_table(SPEC, records, is_running=False)
    assert "study: 1 of 1 trials" in study_table(SPEC, records[:1], is_running=False)
    assert "not running" not in study_table(SPEC, records[:1], is_running=False)


ELSEWHERE = ProcessIdentity("elsewhere", 1, 0)


def beat(driver: ProcessIdentity | None, ago_s: float) -> bytes:
    return json.dumps(asdict(Heartbeat(time.time() - ago_s, driver))).encode()


def test_a_killed_driver_of_this_machine_is_detected_at_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    script = (
        "import sys\n"
        "from undula.storage import Store\n"
        "from undula.state.heartbeat import keep_heartbeat\n"
        f"with keep_heartbeat(Store({str(tmp_path)!r})):\n"
        "    print('begun', flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdout
        assert driver.stdout.readline()
        assert has_driver(store)
        identity = identity_of(driver)
        driver.kill()
    assert not has_driver(store)
    for namespace in ("elsewhere", ""):
        store.write(HEARTBEAT_FILE, beat(replace(identity, namespace=namespace), 0))
        assert has_driver(store), "processes of another machine or container are not checked"
    own = own_identity()
    store.write(HEARTBEAT_FILE, beat(replace(own, started=own.started - 1), 0))
    assert not has_driver(store), "another process has received the id of the driver"
    store.write(HEARTBEAT_FILE, beat(None, 0))
    assert has_driver(store)


def test_a_driver_counts_as_running_while_it_writes_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.1)
    store = Store(str(tmp_path))
    assert not has_driver(store)
    with keep_heartbeat(store):
        assert has_driver(store)
        store.write(HEARTBEAT_FILE, beat(ELSEWHERE, 2 * SILENCE_S))
        until = time.monotonic() + 20
        while not has_driver(store) and time.monotonic() < until:
            time.sleep(0.005)
        assert has_driver(store), "heartbeats are written regularly"
    assert not has_driver(store)
    store.write(HEARTBEAT_FILE, beat(ELSEWHERE, 2 * SILENCE_S))
    assert not has_driver(store), "a killed driver writes no heartbeats"
    refuse_another_driver(store)
    store.write(HEARTBEAT_FILE, beat(ELSEWHERE, 0))
    refuse_another_driver(store)  # the driver has just been killed
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 2.0)  # a busy machine may write a heartbeat late
    with keep_heartbeat(store), pytest.raises(RunError, match="is being trained by another driver"):
        refuse_another_driver(store)
    store.write(HEARTBEAT_FILE, b"{")
    assert not has_driver(store)


def test_rows_have_only_numbers_that_json_supports() -> None:
    row = trial_row(SPEC, record(3, inf, state="diverged"))
    assert (row["last_loss"], row["best_loss"], row["steps_to_target"], row["state"]) == (None, 3, None, "diverged")
    assert trial_row(SPEC, record(3, 9, state="diverged"))["last_loss"] == 9
    assert trial_row(replace(SPEC, target=None), record())["best_loss"] is None
