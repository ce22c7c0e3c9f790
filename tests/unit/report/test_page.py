import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from browser_kit import assert_policy_allows_only

from undula.report.data.run_record import JobRecord, RecordedRun
from undula.report.data.summary import summarize
from undula.report.render.page import render, write_report
from undula.report.render.run_charts import CURVE_POINTS
from undula.state.events import CheckpointEvent, CrashEvent, Event, RecordedEvent, ValidationEvent
from undula.state.ledger import Ledger
from undula.state.ledger_files import EVENT_SCHEMA, STEP_SCHEMA
from undula.storage import Store

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


def recorded(
    steps: int, events: tuple[Event, ...] = (), name: str = "run", logged: dict[str, float] | None = None
) -> RecordedRun:
    """Return a run of one attempt with one step per second. The loss falls from 5, with one spike of 9 in the middle."""
    index = np.arange(steps)
    loss = 5 - 3 * index / max(steps, 1)
    loss[steps // 2 : steps // 2 + 1] = 9.0
    values = {
        "attempt": np.ones(steps), "step": index, "epoch": index * 0, "samples": (index + 1) * 8, "step_samples": index * 0 + 8,
        "world_size": index * 0 + 2, "loss": loss, "lr": 1e-3 * (1 - index / max(steps, 1)), "data_s": loss * 0 + 0.1,
        "transfer_s": loss * 0, "compute_s": loss * 0 + 0.5, "communication_s": loss * 0 + 0.3,
        "other_s": loss * 0 + 0.1, "sample_digest": index * 0,
        "time": index + 1.0, "logged": [json.dumps(logged or {})] * steps, "weights_digest": [None] * steps, "blocked_s": loss * 0,
        "merged_steps": index * 0 + 1, "cells": index * 0 + 2, "grad_norm": loss, "applied": [True] * steps,
        "wait_s": loss * 0 + 0.1,
    }  # fmt: skip
    table = pa.table({field.name: pa.array(values[field.name]).cast(field.type) for field in STEP_SCHEMA})
    event_table = pa.Table.from_pylist([event.row() for event in events], schema=EVENT_SCHEMA)
    return RecordedRun(
        JobRecord(name, total_steps=steps), Ledger(table, STEP_SCHEMA.empty_table(), event_table), events
    )


def page(run: RecordedRun) -> str:
    return render(run, summarize(run.ledger, run.job, now=0.0))


def data_of(html: str) -> dict[str, dict[str, dict[str, list[dict[str, list[float]]]]]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_text_of_the_run_cannot_become_markup() -> None:
    run = recorded(
        5, (CrashEvent("failure", EVIL, time=3.0), RecordedEvent(EVIL, EVIL, step=1, time=4.0)), EVIL, {EVIL: 1.0}
    )
    run = RecordedRun(JobRecord(EVIL, EVIL, {EVIL: EVIL, "config": {"api_key": EVIL}}, 5), run.ledger, run.events)
    html = page(run)
    assert "<script>alert" not in html
    assert "<img" not in html
    assert html.count("<script") == html.count("</script>") == 2
    assert data_of(html)["charts"]["logged-0"]["curves"][0]["label"] == EVIL


def test_policy_allows_only_the_style_and_script_of_the_page() -> None:
    assert_policy_allows_only(page(recorded(5)), "style", "script")


def test_other_means_of_the_validations_have_tiles_and_charts() -> None:
    events = tuple(ValidationEvent(2.0, 9, {"accuracy": step / 8}, step=step, time=step + 0.5) for step in (2, 4))
    html = page(recorded(5, events))
    assert data_of(html)["charts"]["metric-0"]["curves"][0]["y"] == [0.25, 0.5]
    assert re.search(r"accuracy</\w+>\s*<[^>]*>0\.5000<", html)
    assert "accuracy (validation)" in html


def test_a_count_beside_fractions_has_all_of_its_digits() -> None:
    curves = data_of(page(recorded(2, logged={"a": 1 / 3, "seen": 123_456_789})))["charts"]
    assert [curves[f"logged-{place}"]["curves"][0]["y"] for place in (0, 1)] == [[0.333333] * 2, [123_456_789] * 2]


def test_the_page_of_a_run_without_steps_says_so() -> None:
    html = page(recorded(0))
    assert "No step has been committed yet." in html
    assert "The run has no events yet." in html


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_a_page(steps: int) -> None:
    assert f'data-points="{steps}"' in page(recorded(steps))


def test_a_run_whose_losses_are_never_finite_has_a_page() -> None:
    run = recorded(10)
    place = STEP_SCHEMA.get_field_index("loss")
    steps = run.ledger.steps.set_column(place, "loss", pa.array([float("nan")] * 10))
    html = page(RecordedRun(run.job, Ledger(steps, run.ledger.replaced, run.ledger.events), ()))
    assert data_of(html)["charts"]["loss"]["curves"][0]["y"] == [None] * 10


def test_the_page_of_a_long_run_is_small_and_keeps_the_extremes() -> None:
    names = {f"value-{place}": 1 / 3 for place in range(6)}
    events = tuple(CheckpointEvent(1.0, step=at, time=float(at)) for at in range(100, 100_000, 100))
    html = page(recorded(100_000, events, logged=names))
    assert len(html.encode()) < 2_000_000
    loss = data_of(html)["charts"]["loss"]["curves"][0]
    assert len(loss["y"]) <= CURVE_POINTS
    assert (max(loss["y"]), loss["step"][0], loss["step"][-1]) == (9.0, 1, 100_000)


def test_the_report_is_written_to_the_run_directory(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("job.json", b'{"name": "young"}')
    path = write_report(store)
    assert path == str(tmp_path / "report.html")
    assert "young" in Path(path).read_text(encoding="utf-8")
