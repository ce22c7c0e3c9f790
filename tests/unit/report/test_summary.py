import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from report_rows import ledger_of, step_of

from undula.errors import UndulaError
from undula.report.data.curves import downsample, markers_of, smooth
from undula.report.data.run_record import JobRecord, read_run
from undula.report.data.summary import SECONDS_CLASSES, RunSummary, summarize, throughput, validations
from undula.report.render.axes import linear_axis, nice_step, tick_text, ticks
from undula.report.text import duration, number, printable
from undula.state.events import (
    CheckpointEvent,
    CrashEvent,
    EndEvent,
    Event,
    FailEvent,
    GroupEvent,
    ResizeEvent,
    StartEvent,
    StopEvent,
    ValidationEvent,
    WaitingEvent,
)
from undula.state.heartbeat import HEARTBEAT_FILE, SILENCE_S, keep_heartbeat
from undula.state.ledger import decode_events
from undula.state.ledger_files import EVENT_SCHEMA
from undula.state.records import StepRow
from undula.storage import Store

JOB = JobRecord("run", total_steps=10, total_samples=80)
SOME_FLOATS = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])
SERIES = arrays(np.float64, st.integers(1, 300), elements=SOME_FLOATS)


def start(time: float, step: int = 0) -> Event:
    return StartEvent(2, 1, step=step, time=time)


def validation(time: float, step: int, loss: float) -> Event:
    return ValidationEvent(loss, 5, step=step, time=time)


def end(time: float) -> Event:
    return EndEvent(step=10, time=time)


def summary_of(events: list[Event], now: float) -> RunSummary:
    return summarize(ledger_of([], events), JOB, now)


@pytest.mark.parametrize(
    ("last_step", "events", "now", "state"),
    [
        (None, [start(0), end(100)], 101, "finished"),
        (None, [start(0), end(100), start(200)], 1000, "stopped"),
        (None, [start(0), end(100), start(200)], 259, "running"),
        (None, [start(0)], 60, "stopped"),
        (500, [start(0)], 559, "running"),
        (500, [start(0)], 561, "stopped"),
        (500, [start(0), StopEvent(time=501)], 502, "stopped"),
        (500, [start(0), FailEvent("KeyError", time=501)], 502, "failed"),
        (500, [start(0), FailEvent("KeyError", time=501), start(502)], 503, "running"),
    ],
)
def test_the_state_follows_from_the_last_start_and_end_and_from_the_age_of_the_last_entry(
    last_step: float | None, events: list[Event], now: float, state: str
) -> None:
    steps = [] if last_step is None else [step_of(0, time=last_step)]
    assert summarize(ledger_of(steps, events), JOB, now).state == state


WAITS_FOR_CAPACITY = (GroupEvent(({"rank": 0},), time=0.0), WaitingEvent(1, 2, time=10.0))
VALIDATES_FOR_LONG = (start(0), ValidationEvent(1.0, 9, step=0, time=1.0))


@pytest.mark.parametrize(
    "events", [(), (start(0),), WAITS_FOR_CAPACITY, VALIDATES_FOR_LONG, (start(0), StopEvent(time=1.0))]
)
def test_a_run_whose_driver_is_alive_is_running_however_long_its_ledger_is_silent(events: tuple[Event, ...]) -> None:
    found = ledger_of([step_of(0, time=5)], list(events))
    assert summarize(found, JOB, now=10_000, has_driver=True).state == "running"
    assert summarize(found, JOB, now=11, has_driver=False).state == "stopped"


def test_a_finished_run_stays_finished() -> None:
    for has_driver in (True, False, None):
        assert summarize(ledger_of([], [start(0), end(100)]), JOB, now=101, has_driver=has_driver).state == "finished"


def test_the_heartbeat_of_a_run_says_whether_its_driver_is_alive(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("job.json", b'{"name": "x"}')
    assert read_run(store).has_driver is None
    with keep_heartbeat(store):
        assert read_run(store).has_driver is True
        beat = json.loads(store.read(HEARTBEAT_FILE))
    assert read_run(store).has_driver is False, "the driver has ended and has said so, also if the training has failed"
    for change in ({"time": beat["time"] - 2 * SILENCE_S}, {"driver": {**beat["driver"], "started": 1}}):
        store.write(HEARTBEAT_FILE, json.dumps(beat | change).encode())
        assert read_run(store).has_driver is False


def test_a_run_without_steps_has_no_figures() -> None:
    summary = summary_of([], now=0)
    assert (summary.state, summary.steps, summary.samples, summary.wall_s) == ("stopped", 0, 0, 0.0)
    assert summary.samples_per_s is summary.training_loss is summary.last_validation_loss is summary.began is None
    assert json.loads(json.dumps(summary.as_json(), allow_nan=False))["total_steps"] == 10


def test_figures_agree_with_the_ledger() -> None:
    steps = [step_of(step, loss=float(step), world_size=2 if step < 20 else 1, time=step) for step in range(30)]
    steps[3:5] = [replace(each, applied=False) for each in steps[3:5]]
    events = [
        start(-1),
        validation(0, 0, 9.0),
        validation(15, 15, 2.0),
        CrashEvent("failure", "e", time=16),
        ResizeEvent(2, 1, "a notice", time=17),
        start(18, 16),
        CheckpointEvent(1.0, step=20, time=20),
        validation(30, 30, 3.0),
        end(31),
    ]
    summary = summarize(ledger_of(steps, events, [step_of(16), step_of(17)]), JOB, now=0)
    assert (summary.steps, summary.samples, summary.replayed_steps, summary.skipped_steps) == (30, 240, 2, 2)
    assert (summary.first_validation_loss, summary.last_validation_loss) == (9.0, 3.0)
    assert (summary.best_validation_loss, summary.best_validation_step) == (2.0, 15)
    assert summary.training_loss == np.mean(range(10, 30))
    assert summary.samples_per_s == pytest.approx(8.0)
    assert (summary.began, summary.latest, summary.wall_s) == (-1, 31, 32)
    assert (summary.attempts, summary.crashes, summary.resizes, summary.checkpoints) == (2, 1, 1, 1)
    assert summary.world_sizes == (1, 2)
    assert summary.seconds == pytest.approx(
        {"compute": 15.0, "communication": 9.0, "data": 3.0, "transfer": 0.0, "other": 3.0}
    )


def test_a_loss_that_is_not_finite_is_shown_but_is_never_the_best() -> None:
    summary = summary_of([validation(0, 0, 4.0), validation(1, 5, math.nan)], now=0)
    assert math.isnan(summary.last_validation_loss or 0.0)
    assert summary.best_validation_loss == 4.0
    assert summary.as_json()["last_validation_loss"] is None


def test_a_repeated_validation_replaces_the_earlier_one() -> None:
    events = [start(0), validation(1, 5, 2.0), validation(2, 8, 1.0), start(3, 5)]
    assert [(entry.step, entry.loss) for entry in validations(events)] == [(5, 2.0)]
    again = [*events, validation(4, 8, 1.5)]
    assert [(entry.step, entry.loss) for entry in validations(again)] == [(5, 2.0), (8, 1.5)]


def test_an_event_without_a_step_is_marked_at_the_last_committed_step() -> None:
    steps = ledger_of([step_of(0, time=1), step_of(1, time=2), step_of(2, attempt=2, time=9)]).steps
    (marker,) = markers_of([CrashEvent("failure", "e", time=5.0)], steps, began=1.0)
    assert (marker.time, marker.samples) == (4.0, 16.0)


@given(st.lists(st.tuples(*[st.floats(0, 100)] * 4), min_size=1, max_size=30))
def test_seconds_of_the_classes_add_up_to_the_steps(seconds: list[tuple[float, float, float, float]]) -> None:
    steps = [StepRow(1, k, 0, k + 1, 1, 1, 0.0, 0.0, *parts, 0, 0.0) for k, parts in enumerate(seconds)]
    summary = summarize(ledger_of(steps, []), JOB, now=0)
    assert set(summary.seconds) == set(SECONDS_CLASSES)
    assert sum(summary.seconds.values()) == pytest.approx(sum(map(sum, seconds)))
    assert np.isfinite(throughput(ledger_of(steps).steps)).all()


@given(SERIES, st.integers(4, 60))
def test_downsampling_keeps_ends_and_extremes_within_the_limit(ys: np.ndarray, limit: int) -> None:
    kept = downsample(ys, limit)
    assert len(kept) <= limit
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, len(ys) - 1)
    finite = ys[np.isfinite(ys)]
    if len(finite):
        shown = ys[kept][np.isfinite(ys[kept])]
        assert (shown.min(), shown.max()) == (finite.min(), finite.max())


@given(arrays(np.float64, st.integers(1, 200), elements=st.floats(-1e3, 1e3)), st.integers(0, 60))
def test_smoothing_stays_between_the_extremes(ys: np.ndarray, half: int) -> None:
    smoothed = smooth(ys, 2 * half + 1)
    assert smoothed.shape == ys.shape
    assert (smoothed >= ys.min() - 1e-6).all()
    assert (smoothed <= ys.max() + 1e-6).all()


def test_smoothing_keeps_a_line_to_its_ends() -> None:
    line = np.linspace(5.0, 1.0, 384)
    assert smooth(line, 19) == pytest.approx(line)


def test_smoothing_ignores_values_that_are_not_finite() -> None:
    assert smooth(np.array([1.0, math.nan, 3.0, math.inf, 5.0]), 3).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert np.isnan(smooth(np.array([math.nan, math.nan]), 3)).all()


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9), st.integers(3, 10))
def test_ticks_lie_in_their_interval_and_are_few(low: float, span: float, about: int) -> None:
    high = low + span
    if high - low < abs(low) * 1e-6:
        return
    step = nice_step(high - low, about)
    placed = ticks(low, high, step)
    assert len(placed) <= about + 1
    assert all(low - step * 1e-6 <= tick <= high + step * 1e-6 for tick in placed)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_an_axis_has_two_ticks_at_least(low: float, span: float, about: int) -> None:
    assert 2 <= len(linear_axis(low, low + span, about).ticks) <= 4 * about + 1


def test_an_accuracy_of_nearly_the_whole_range_has_a_scale() -> None:
    assert [label for _, label in linear_axis(0.05, 0.96, 4).ticks] == ["0.2", "0.4", "0.6", "0.8"]


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [
        (0, 1, "0"),
        (2.5, 0.5, "2.5"),
        (3e-4, 1e-4, "3e-4"),
        (1.5e-4, 5e-5, "1.5e-4"),
        (12_000, 2000, "12k"),
        (1.5e6, 5e5, "1.5M"),
    ],
)
def test_a_tick_has_as_many_digits_as_its_distance_needs(value: float, step: float, text: str) -> None:
    assert tick_text(value, step) == text


def test_figures_are_formatted_by_size() -> None:
    assert [number(v) for v in (None, math.nan, 0.0, 1.78912, 0.01234567, 183.14, 12345.6, 3e-4, 2.5e7)] == [
        "–", "nan", "0", "1.789", "0.01235", "183.1", "12,346", "3e-4", "2.5e7"
    ]  # fmt: skip
    assert [duration(s) for s in (0.42, 12.3, 303, 7500, 273_600)] == [
        "0.42 s", "12 s", "5 min 03 s", "2 h 05 min", "3 d 4 h"
    ]  # fmt: skip


def test_untrusted_text_cannot_control_the_terminal() -> None:
    assert printable("a\x1b[31mb\nc\u202ed") == "a [31mb c d"
    assert len(printable("x" * 1000, 50)) == 50


def test_event_data_that_is_not_a_mapping_is_ignored() -> None:
    table = pa.Table.from_pylist(
        [{"time": 0.0, "kind": "validation", "step": 1, "message": "", "data": text} for text in ("[1]", None, "{}")],
        schema=EVENT_SCHEMA,
    )
    assert [event.data for event in decode_events(table)] == [{}, {}, {}]
    assert validations(decode_events(table)) == ()


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "has no job.json; name the directory of a run"),
        ({"job.json": b"{"}, "job.json is damaged"),
        ({"job.json": b"[]"}, "job.json is damaged"),
        ({"job.json": b'{"name": "x", "spec": 3}'}, "job.json is damaged"),
        ({"job.json": b'{"total_steps": 3}'}, "job.json is damaged"),
        ({"job.json": b'{"name": "x"}', "ledger/steps-000001-00000.parquet": b"junk"}, "steps-000001-00000.parquet cannot be read"),
    ],
)  # fmt: skip
def test_a_directory_without_a_complete_run_is_refused_in_one_sentence(
    tmp_path: Path, files: dict[str, bytes], sentence: str
) -> None:
    store = Store(str(tmp_path))
    for name, data in files.items():
        store.write(name, data)
    with pytest.raises(UndulaError, match=sentence) as caught:
        read_run(store)
    assert "\n" not in str(caught.value)
    assert not re.search("delete|remove|--fresh", str(caught.value))
    assert str(tmp_path) in str(caught.value)
