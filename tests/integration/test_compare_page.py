"""Tests of the page of a comparison in a real browser, on a phone and on a wide screen."""

from pathlib import Path

import pytest
from browser_kit import needs_chromium, opened_in
from playwright.sync_api import Browser
from priced_run import SPOT, write_priced_run

from undula.cluster.prices import load_prices
from undula.report.data.comparison import compare
from undula.report.data.run_record import read_run
from undula.report.render.comparison import render_comparison
from undula.storage import Store

NAMES = ("all-on-spot", "with-one-on-demand-node-and-a-long-name", "unpriced")

pytestmark = needs_chromium


@pytest.mark.parametrize("width", [400, 1600])
def test_the_curves_of_all_runs_are_drawn_over_each_axis_at_any_width(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    for name, other in zip(NAMES, (SPOT, ("g6.xlarge", "on-demand"), ("a-machine-without-price", "spot")), strict=True):
        write_priced_run(Store(f"{tmp_path}/{name}"), other)
    records = {name: read_run(Store(f"{tmp_path}/{name}")) for name in NAMES}
    page_file = tmp_path / "compare.html"
    page_file.write_text(render_comparison(compare(records, 1.8e9, lambda events: load_prices())))
    with opened_in(browser, page_file, width) as opened:
        for axis, curves in (("samples", 3), ("step", 3), ("time", 3), ("dollars", 2)):
            opened.page.locator(f"label:has(#by-{axis})").click()
            assert opened.chart("loss", axis).locator(".curve[data-points]").count() == curves
            tip = opened.hover("loss", 0.5, axis)
            assert all((name in tip) == (place < curves) for place, name in enumerate(NAMES)), tip
        first, other = (opened.chart("loss", "samples").locator(f".curve.{css}").first for css in ("r-first", "r-1"))
        widths = [
            float(each.evaluate("each => getComputedStyle(each).strokeWidth").removesuffix("px"))
            for each in (first, other)
        ]
        assert widths[0] > 2 * widths[1], "an equal curve does not hide the first one"
        assert opened.page.locator("h2").first.inner_text() == "Verified"
        assert "The cost of unpriced is not known" in opened.page.locator(".view.dollars").inner_text()
        assert opened.page.locator(".v-not-rejected").count() == 2
        opened.assert_fits_and_is_quiet()
