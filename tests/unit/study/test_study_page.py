"""Tests of a study's report: its files, its handling of untrusted text, and the page in a real browser."""

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from math import nan
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow.csv as csv
import pyarrow.parquet as parquet
import pytest
from browser_kit import assert_policy_allows_only, needs_chromium, opened_in
from playwright.sync_api import Browser
from study_records import quadratic_records, valley

from undula.report.render.axes import log_ticks, tick_label
from undula.storage import Store
from undula.study.findings import find
from undula.study.render.page import png, render, verdict_lines, write_report
from undula.study.render.rate_figures import draw_map
from undula.study.render.report_tables import Cell, cost_table, trial_table
from undula.study.spec import LogRange, StudySpec
from undula.study.trials import TrialRecord

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&<b>gone</b>\x1b[31m"
FIGURES = ("steps", "samples", "pareto", "rates", "best-rate", "predicted", "noise", "map")
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="9" font-family="DejaVu Sans">'
WHOLE_SAMPLES = 16_000_000


def study(**changes: Any) -> StudySpec:
    values: dict[str, Any] = {
        "name": "quadratic", "job": "job.yaml", "batches": (16, 64, 256, 1024), "base_lr_range": LogRange(0.02, 3.0, 10),
        "optimizers": ("sgd",), "warmups": (0, 1000), "seeds": (0, 1), "target": 0.01,
    }  # fmt: skip
    return StudySpec(**{**values, **changes})


def mishaps(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return one trial of each kind without a result, with text that looks like markup."""
    found = list(records)
    found[0] = replace(found[0], state="failed", curve=(), message=EVIL)
    found[3] = replace(found[3], state="stopped", curve=found[3].curve[:5])
    found[7] = replace(found[7], state="waiting", curve=(), noise=())
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = study(job=EVIL, worker_hour=0.5)
    store = Store(str(tmp_path_factory.mktemp("study")))
    return Path(write_report(store, spec, mishaps(quadratic_records(spec, WHOLE_SAMPLES, 0.01))))


def page_of(tmp_path: Path, spec: StudySpec, records: Sequence[TrialRecord]) -> str:
    return Path(write_report(Store(str(tmp_path)), spec, records)).read_text(encoding="utf-8")


def test_the_report_has_a_page_and_files_of_every_figure_and_trial(report: Path) -> None:
    folder = report.parent
    assert report.name == "index.html"
    for group in ("sgd-w0", "sgd-w1000"):
        for name in FIGURES:
            assert (folder / f"figures/{group}-{name}.png").read_bytes().startswith(b"\x89PNG")
            assert ElementTree.parse(folder / f"figures/{group}-{name}.svg").getroot().tag.endswith("svg")
    assert (folder / "figures/sgd-warmup.svg").exists()
    assert report.stat().st_size < 1_500_000
    html = report.read_text(encoding="utf-8")
    for text in ("at $0.500 per worker and hour", '<span class="state unfinished">', "1 trial not finished"):
        assert text in html


def test_csv_and_parquet_have_the_same_trials(report: Path) -> None:
    rows = parquet.read_table(report.parent / "trials.parquet").to_pylist()
    texts = csv.read_csv(
        io.BytesIO((report.parent / "trials.csv").read_bytes()), parse_options=csv.ParseOptions(newlines_in_values=True)
    )
    assert [row["name"] for row in rows] == texts["name"].to_pylist()
    assert len(rows) == 160
    assert (rows[0]["state"], rows[0]["message"], rows[0]["last_loss"]) == ("failed", EVIL, None)
    done = next(row for row in rows if row["steps_to_target"] is not None)
    assert done["last_loss"] >= done["best_loss"]
    assert done["dollars"] == pytest.approx(done["worker_seconds"] / 3600 * 0.5)
    diverged = [row for row in rows if row["state"] == "diverged"]
    assert diverged
    assert {(row["last_loss"], row["best_loss"], row["steps_to_target"]) for row in diverged} == {(None, 5.0, None)}


def test_packed_trials_pay_for_their_share_of_a_worker() -> None:
    """Four trials share a worker that costs a dollar per hour, for one hour."""
    spec = study(batches=(32,), rules=("none",), warmups=(), seeds=(0,), packed=4, worker_hour=1.0)
    hour = [replace(each, seconds=3600.0, worker_seconds=3600.0) for each in quadratic_records(spec, WHOLE_SAMPLES)[:4]]
    assert sum(trial_table(spec, hour)["dollars"].to_pylist()) == pytest.approx(1.0)
    assert sum(trial_table(spec, hour)["worker_seconds"].to_pylist()) == pytest.approx(3600)
    assert [row[-2:] for row in cost_table(find(spec, hour)).rows][-1] == (Cell("1 h 00 min", "n"), Cell("$1.00", "n"))
    html = render(find(spec, hour), [()], ())
    assert "$1.00" in html
    assert "the 4 trials that share a worker" in html


def test_untrusted_text_cannot_become_markup(report: Path) -> None:
    html = report.read_text(encoding="utf-8")
    assert "<script" not in html
    assert "<img" not in html
    assert "<b>" not in html
    assert "\x1b" not in html
    assert "&lt;script&gt;alert(1)" in html


def test_policy_allows_only_the_style_of_the_page(report: Path) -> None:
    assert_policy_allows_only(report.read_text(encoding="utf-8"), "style")


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_logs_nothing_requests_nothing_and_fits(browser: Browser, report: Path, width: int, scheme: str) -> None:
    with opened_in(browser, report, width, scheme) as opened:
        page = opened.page
        opened.assert_fits_and_is_quiet()
        assert page.title() == "quadratic · Undula"
        boxes = [plot.bounding_box() for plot in page.locator(".fig .plot").all()]
        assert boxes
        assert all(box and box["width"] > min(width, 560) - 150 for box in boxes)
        # Figures use the colours of the page, also in dark mode, and also in shapes that they reuse.
        ink = page.evaluate("getComputedStyle(document.body).color")
        for shape, attribute in (("path.curve.ink", "stroke"), ("use.glyph.ink", "fill")):
            drawn = page.locator(f".fig {shape}").first
            assert drawn.evaluate(f"each => getComputedStyle(each).{attribute}") == ink


@needs_chromium
def test_all_text_of_a_figure_lies_inside_it_on_the_page_and_in_its_file(browser: Browser, report: Path) -> None:
    for file in (report, *sorted(report.parent.glob("figures/*.svg"))):
        with opened_in(browser, file, 1280) as opened:
            assert opened.page.locator("svg text").count() > 10
            outside = opened.page.evaluate(
                """() => [...document.querySelectorAll('svg text')].filter(text => {
                  const box = text.getBoundingClientRect();
                  const all = (text.closest('.fig') || document.documentElement).getBoundingClientRect();
                  return box.left < all.left || box.right > all.right || box.top < all.top || box.bottom > all.bottom;
                }).map(text => text.textContent)"""
            )
            assert outside == [], file


def test_png_files_have_the_letters_of_the_shipped_font(report: Path) -> None:
    for file in report.parent.glob("figures/*.svg"):
        texts = "".join(re.findall(r"<text[^>]*>([^<]+)</text>", unescape(file.read_text(encoding="utf-8"))))
        assert {letter for letter in texts if not letter.isascii()} <= {*"·×–…−≤≥→"}  # as in DejaVuSans.ttf
    assert png(f"{SVG}<text y='9'>loss</text></svg>") != png(f"{SVG}</svg>")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (study(target=1e-9), "No trial reached the target of 1e-09"),
        (study(target=1e9), "Trials are at the target of 1e+09 before their first step"),
        (study(target=None), "The study has no target"),
        (study(batches=(16,)), "The study has one batch (16)"),
        (study(base_lr_range=LogRange(3, 30, 4)), "Every learning rate diverged at every batch; lower rates are needed"),
        (study(base_lr_range=LogRange(1e-6, 1e-5, 4)), "bracket the best one at no batch sizes"),
        (study(warmups=(0,)), "The study has one warmup (0 samples)"),
        (study(rules=("none", "linear"), optimizers=("adamw",)), "linear is only known to hold for LARS, SGD, but the optimizer is AdamW"),
    ],
)  # fmt: skip
def test_a_figure_that_cannot_be_drawn_has_a_reason(tmp_path: Path, spec: StudySpec, reason: str) -> None:
    spec = replace(spec, seeds=(0,), warmups=(0,))
    html = page_of(tmp_path, spec, quadratic_records(spec, 1_000_000))
    assert reason in html


@pytest.mark.parametrize("state", ["waiting", "running", "failed", "stopped", "diverged"])
def test_a_study_without_results_has_a_page(tmp_path: Path, state: Any) -> None:
    spec = study(seeds=(0,), warmups=(0,))
    records = [replace(each, state=state, curve=(), noise=(), lr=nan) for each in quadratic_records(spec, 1000)]
    html = page_of(tmp_path, spec, records)
    assert "No rule is tested" in html
    assert 'class="none"' in html
    assert "No trial has started yet." in page_of(tmp_path, spec, [])


def test_negative_and_equal_losses_have_figures(tmp_path: Path) -> None:
    spec = study(seeds=(0,), warmups=(0,), target=None)
    for shift, scale in ((-5.0, 1.0), (0.0, 0.0)):
        records = [
            replace(each, curve=tuple(replace(point, loss=shift + scale * point.loss) for point in each.curve))
            for each in quadratic_records(spec, 1_000_000)
        ]
        assert "sgd-w0-rates.svg" in page_of(tmp_path, spec, records)


def test_trials_that_were_stopped_above_the_plot_are_marked_at_its_top(tmp_path: Path) -> None:
    spec = study(seeds=(0,), warmups=(0,), target=None)
    records = quadratic_records(spec, 1_000_000)
    for seen, is_above in ((1e-3, False), (4e3, True)):
        curve = (*records[0].curve[:2], replace(records[0].curve[2], loss=seen))
        html = page_of(tmp_path, spec, [replace(records[0], state="stopped", curve=curve), *records[1:]])
        assert ("stopped, higher" in html) == is_above


def test_a_near_tie_does_not_take_the_colours_of_the_map(tmp_path: Path) -> None:
    spec = study(seeds=(0,), warmups=(0,), target=None)
    records = valley(16, 0.1, (0.1, 0.101, 0.5, 2.0))
    found = find(replace(spec, batches=(16,)), records).groups[0]
    shown = [float(key.label[1:]) for key in draw_map(found.main).keys if key.label.startswith("+")]
    assert shown[-1] / shown[0] == pytest.approx(300, rel=0.05)


def test_other_rules_have_their_own_figures(tmp_path: Path) -> None:
    spec = study(rules=("none", "adam_sde", "surge"), optimizers=("adamw",), seeds=(0,), warmups=(0,))
    html = page_of(tmp_path, spec, quadratic_records(spec, 1_000_000))
    assert "Loss against learning rate under adam_sde" in html
    assert "adamw-w0-rates-surge.svg" in html


def test_the_terminal_has_the_verdicts_of_the_page(report: Path) -> None:
    spec = study()
    lines = verdict_lines(spec, quadratic_records(spec, WHOLE_SAMPLES, 0.01))
    assert lines[0] == "sgd, no warmup:"
    assert any("the best learning rate scales as batch^" in line for line in lines)
    assert "not tested:" in lines


def test_ticks_are_round_numbers_in_their_range() -> None:
    assert log_ticks(0.001, 10) == [0.001, 0.01, 0.1, 1, 10]
    assert log_ticks(1, 30) == [1, 3, 10, 30]
    assert log_ticks(6.1, 6.9) == pytest.approx([6.2, 6.4, 6.6, 6.8])
    assert [tick_label(each) for each in (1e-5, 0.002, 1, 5000, 20_000, 3e6, 1.5e9)] == [
        "1e-5",
        "0.002",
        "1",
        "5,000",
        "20k",
        "3M",
        "1.5G",
    ]
