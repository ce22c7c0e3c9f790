"""Tests of the page of a comparison in a real browser, on a phone and on a wide screen."""

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from priced_run import SPOT, write_priced_run

from undula.cluster.prices import load_prices
from undula.report.data.comparison import compare
from undula.report.data.run_record import read_run
from undula.report.render.comparison import render_comparison
from undula.storage import Store

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
NAMES = ("all-on-spot", "with-one-on-demand-node-and-a-long-name", "unpriced")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium found: run tests/install_chromium.sh")


def test_the_curves_of_all_runs_are_drawn_over_each_axis_at_any_width(tmp_path: Path) -> None:
    for name, other in zip(NAMES, (SPOT, ("g6.xlarge", "on-demand"), ("a-machine-without-price", "spot")), strict=True):
        write_priced_run(Store(f"{tmp_path}/{name}"), other)
    records = {name: read_run(Store(f"{tmp_path}/{name}")) for name in NAMES}
    page_file = tmp_path / "compare.html"
    page_file.write_text(render_comparison(compare(records, 1.8e9, lambda events: load_prices())))
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*QUIET])
        for width in (400, 1600):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(page_file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") == width
            for axis, curves in (("samples", 3), ("step", 3), ("time", 3), ("dollars", 2)):
                page.locator(f"label:has(#by-{axis})").click()
                chart = page.locator(f".view.{axis} figure[data-key=loss]")
                assert chart.locator(".curve[data-points]").count() == curves
                plot = chart.locator(".plot")
                plot.scroll_into_view_if_needed()
                page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
                box = plot.bounding_box()
                assert box
                page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
                tip = page.locator("#tip").inner_text()
                assert all((name in tip) == (place < curves) for place, name in enumerate(NAMES)), tip
            assert "The cost of unpriced is not known" in page.locator(".view.dollars").inner_text()
            assert page.locator(".v-not-rejected").count() == 2
        browser.close()
    assert complaints == []
