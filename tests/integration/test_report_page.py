"""Tests of the report page in a real browser."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_kit import Opened, needs_chromium, opened_in
from playwright.sync_api import Browser
from priced_run import write_priced_run
from report_rows import step_of

from undula.cluster.prices import load_prices
from undula.report.render.page import write_report
from undula.state.events import CheckpointEvent, CrashEvent, EndEvent, StartEvent, ValidationEvent
from undula.state.ledger import EventWriter, LedgerWriter
from undula.storage import Store

EVIL = "run</title><script>document.title = 'taken'</script>"
CRASH = "rank 1: <b>lost</b>"
BEGAN = 1_795_233_000.0

pytestmark = needs_chromium


def loss_of(step: int) -> float:
    return 2 + 3 * math.exp(-step / 20)


def write_run(store: Store) -> None:
    """Write a run with one step per second: steps 0-59 on two workers, a crash that loses 50-59, and 50-99 on one, 10 s later."""
    job = {"name": EVIL, "plan_digest": "d" * 64, "spec": {"config": {"note": EVIL}}, "total_steps": 100}
    store.write("job.json", json.dumps(job).encode())
    events = EventWriter(store, "test")
    for attempt, start, stop, began in ((1, 0, 60, 0.0), (2, 50, 100, 70.0)):
        events.event(StartEvent(3 - attempt, attempt, step=start, time=BEGAN + began))
        ledger = LedgerWriter(store, attempt)
        for step in range(start, stop):
            when = BEGAN + began + step - start + 1
            values = {"attempt": attempt, "world_size": 3 - attempt, "loss": loss_of(step), "lr": 1e-3, "time": when}
            ledger.step(step_of(step, **values, logged=json.dumps({"grad_norm": 1 + step / 100})))
            if step % 25 == 24:
                ledger.event(ValidationEvent(loss_of(step) + 0.5, 9, step=step + 1, time=when))
                ledger.event(CheckpointEvent(1.0, step=step + 1, time=when))
        ledger.close()
    events.event(CrashEvent("failure", CRASH, time=BEGAN + 60))
    events.event(EndEvent(step=100, time=BEGAN + 120))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    store = Store(str(tmp_path_factory.mktemp("run")))
    write_run(store)
    return write_report(store)


@pytest.fixture(params=[1280, 400])
def opened(browser: Browser, report: str, request: pytest.FixtureRequest) -> Iterator[Opened]:
    with opened_in(browser, report, request.param) as opened:
        yield opened


def test_page_logs_nothing_runs_only_its_script_and_requests_nothing(opened: Opened) -> None:
    opened.hover("loss", 0.5)
    opened.assert_fits_and_is_quiet()
    assert opened.page.title() == f"{EVIL} · Undula"
    assert opened.page.locator("h1").inner_text() == EVIL
    assert opened.page.locator("b", has_text="lost").count() == 0


@pytest.mark.parametrize("axis", ["time", "samples"])
def test_every_curve_has_every_committed_step(opened: Opened, axis: str) -> None:
    for key in ("loss", "lr", "throughput", "world_size", "logged-0"):
        chart = opened.chart(key, axis)
        curve = chart.locator(".curve:not(.mark)[data-points]").first
        assert curve.get_attribute("data-points") == "100", key
        assert len(curve.get_attribute("d") or "") > 300, key
        for kind, count in (("start", 2), ("crash", 1), ("end", 1), ("checkpoint", 4)):
            assert chart.locator(f".e-{kind}").get_attribute("data-points") == str(2 * count), key


def test_loss_shows_validations_and_replayed_steps(opened: Opened) -> None:
    assert opened.chart("loss").locator(".plot use.point").count() == 4
    assert opened.chart("loss").locator(".lost[data-points]").get_attribute("data-points") == "10"
    assert opened.chart("loss", "samples").locator(".lost").count() == 0


def test_tooltip_shows_the_values_of_the_nearest_step(opened: Opened) -> None:
    text = opened.hover("loss", 30 / 120)
    assert "step 30 " in text
    assert f"{loss_of(29):.3f}" in text
    assert "crash" not in text
    assert "0.001" in opened.hover("lr", 0.8)


def test_tooltip_tells_events_and_validations_near_it(opened: Opened) -> None:
    assert CRASH in opened.hover("throughput", 60 / 120)
    text = opened.hover("loss", 25 / 120)
    assert f"{loss_of(24) + 0.5:.3f}" in text
    assert "checkpoint: " in text


def test_charts_can_switch_to_samples(opened: Opened) -> None:
    assert not opened.chart("loss", "samples").is_visible()
    opened.page.get_by_text("samples", exact=True).locator("visible=true").locator("xpath=self::label").click()
    assert opened.chart("loss", "samples").is_visible()
    assert not opened.chart("loss").is_visible()
    assert f"{loss_of(74):.3f}" in opened.hover("loss", 0.75, "samples")


def test_arrow_keys_move_along_a_curve(opened: Opened) -> None:
    opened.chart("loss").locator(".plot").focus()
    for _ in range(3):
        opened.page.keyboard.press("ArrowRight")
    assert "step 4 " in opened.page.locator("#tip").inner_text()
    opened.page.keyboard.press("Escape")
    assert not opened.page.locator("#tip").is_visible()


@pytest.mark.parametrize("width", [1280, 400])
def test_cost_has_a_bar_of_all_classes_and_its_lines(browser: Browser, tmp_path: Path, width: int) -> None:
    store = Store(str(tmp_path))
    write_priced_run(store)
    with opened_in(browser, write_report(store, lambda events: load_prices()), width) as opened:
        page = opened.page
        bars = page.locator(".cost .share rect")
        widths = [box["width"] for box in (bar.bounding_box() for bar in bars.all()) if box]
        whole = page.locator(".cost .share").bounding_box()
        assert whole
        assert sum(widths) == pytest.approx(whole["width"], rel=0.01)
        assert len({bar.evaluate("each => getComputedStyle(each).fill") for bar in bars.all()}) == 6
        text = page.locator(".cost").inner_text()
        assert "waiting for capacity\n$0.144" in text
        assert "39% saved" in text
        opened.assert_fits_and_is_quiet()
