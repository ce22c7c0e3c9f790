"""Tests of the report page in a real browser."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright
from priced_run import write_priced_run

from undula.cluster.prices import load_prices
from undula.report.render.page import write_report
from undula.state.events import CheckpointEvent, CrashEvent, EndEvent, StartEvent, ValidationEvent
from undula.state.ledger import EventWriter, LedgerWriter
from undula.state.records import StepRow
from undula.storage import Store

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
EVIL = "run</title><script>document.title = 'taken'</script>"
CRASH = "rank 1: <b>lost</b>"
BEGAN = 1_795_233_000.0

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium found: run tests/install_chromium.sh")


@dataclass
class Opened:
    """Open page, with its errors and its network requests."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def chart(self, key: str, axis: str = "time") -> Locator:
        return self.page.locator(f".view.{axis} figure[data-key={key}]")

    def hover(self, key: str, fraction: float, axis: str = "time") -> str:
        """Return the tooltip with the pointer at a fraction of a chart's width."""
        plot = self.chart(key, axis).locator(".plot")
        plot.scroll_into_view_if_needed()
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        box = plot.bounding_box()
        assert box
        self.page.mouse.move(box["x"] + fraction * box["width"], box["y"] + box["height"] / 2)
        return self.page.locator("#tip").inner_text()


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
            logged = json.dumps({"grad_norm": 1 + step / 100})
            row = StepRow(
                attempt,
                step,
                0,
                (step + 1) * 8,
                8,
                3 - attempt,
                loss_of(step),
                1e-3,
                0.1,
                0.5,
                0.3,
                0.1,
                0,
                when,
                logged,
            )
            ledger.step(row)
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(params=[1280, 400])
def opened(browser: Browser, report: str, request: pytest.FixtureRequest) -> Iterator[Opened]:
    page = browser.new_page(viewport={"width": request.param, "height": 900})
    opened = Opened(page)
    page.on("console", lambda message: opened.complaints.append(message.text))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(Path(report).as_uri())
    yield opened
    page.close()


def test_page_logs_nothing_runs_only_its_script_and_requests_nothing(opened: Opened, report: str) -> None:
    opened.hover("loss", 0.5)
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [Path(report).as_uri()]
    assert opened.page.title() == f"{EVIL} · Undula"
    assert opened.page.locator("h1").inner_text() == EVIL
    assert opened.page.locator("b", has_text="lost").count() == 0
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


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
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(Path(write_report(store, lambda events: load_prices())).as_uri())
    bars = page.locator(".cost .share rect")
    widths = [box["width"] for box in (bar.bounding_box() for bar in bars.all()) if box]
    whole = page.locator(".cost .share").bounding_box()
    assert whole
    assert sum(widths) == pytest.approx(whole["width"], rel=0.01)
    assert len({bar.evaluate("each => getComputedStyle(each).fill") for bar in bars.all()}) == 6
    text = page.locator(".cost").inner_text()
    assert "waiting for capacity\n$0.144" in text
    assert "39% saved" in text
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert complaints == []
    page.close()
