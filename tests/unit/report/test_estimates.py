"""Tests of what was expected of a run, beside what was measured."""

import pytest
from report_rows import ledger_of, step_of
from rich.console import Console

from undula.report.data.estimates import estimates_of
from undula.report.data.run_record import JobRecord
from undula.report.data.summary import summarize
from undula.report.render.terminal import run_tables
from undula.state.events import EstimateEvent, MemoryEvent

GIB = 2**30
EXPECTED = EstimateEvent("L4", 10 * GIB, 11.2 * GIB, 22 * GIB, {"1": 1.7, "2": 0.9}, time=-1.0)


def test_without_an_estimate_there_is_nothing_to_compare() -> None:
    assert estimates_of([MemoryEvent(1.0, 2.0, 3.0)], ledger_of([step_of(0)]).steps) is None


def test_before_the_first_step_only_the_estimate_is_known() -> None:
    found = estimates_of([EXPECTED], ledger_of([]).steps)
    assert found
    assert found.bytes == 10 * GIB
    assert (found.measured_bytes, found.step_s, found.measured_step_s) == (None, None, None)
    assert found.lines() == [("GPU memory", "–", "at most; 10.00 GiB expected")]


def test_the_duration_of_a_step_is_compared_at_the_number_of_workers_with_most_steps() -> None:
    steps = [step_of(0, world_size=1, compute_s=9.0), *(step_of(step, world_size=2) for step in range(1, 4))]
    found = estimates_of([EXPECTED, MemoryEvent(2 * GIB, 9.5 * GIB, 12 * GIB)], ledger_of(steps).steps)
    assert found
    assert (found.measured_bytes, found.world_size, found.step_s) == (9.5 * GIB, 2, 0.9)
    assert found.measured_step_s == pytest.approx(1.0)
    assert found.lines()[1] == ("step", "1 s", "median with 2 workers; 0.9 s expected")


def test_what_an_earlier_submission_has_measured_is_not_compared() -> None:
    events = [MemoryEvent(2 * GIB, 6 * GIB, 7 * GIB, time=-2.0), EXPECTED]
    found = estimates_of(events, ledger_of([step_of(0, time=-3.0)]).steps)
    assert found
    assert (found.measured_bytes, found.measured_step_s) == (None, None)


def test_a_run_shows_both() -> None:
    ledger = ledger_of([step_of(0)], [EXPECTED, MemoryEvent(2 * GIB, 9.5 * GIB, 12 * GIB)])
    summary = summarize(ledger, JobRecord("run"), now=0.0)
    console = Console(width=80)
    with console.capture() as shown:
        console.print(run_tables(summary, None, 80))
    assert "9.50 GiB  (at most; 10.00 GiB expected)" in shown.get()
    assert summary.as_json()["estimates"]["measured_bytes"] == 9.5 * GIB


def test_a_need_within_the_margin_is_told_with_a_doubt() -> None:
    tight = EstimateEvent("L4", 21 * GIB, 22.9 * GIB, 22 * GIB)
    assert tight.message == "A worker is expected to need 22.9 GiB of the 22.0 GiB of L4, which may be too little."
    assert EXPECTED.message == (
        "A worker is expected to need 11.2 GiB of the 22.0 GiB of L4, and a step to take 1.7 s with 1 worker, 0.9 s with 2 workers."
    )
