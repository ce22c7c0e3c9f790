"""Tests of `undula bench scaling` with the main job, and of its page in a real browser."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser_kit import needs_chromium, opened_in
from jobs_kit import LANGUAGE_MODEL, SMALL
from playwright.sync_api import Browser

from undula.report.data.sameness import Sameness
from undula.report.data.scaling import CLASSES, Round, Scaling, scaling_of
from undula.report.render.scaling_page import render_scaling

JOB = LANGUAGE_MODEL.with_suffix(".yaml")
OTHER = (
    f"{sys.executable} -c 'import json; "
    'json.dump(dict(seconds=[0.5 / {workers}] * {steps}, samples={global_batch}), open("{out}", "w"))\''
)


@pytest.mark.nightly
def test_runs_on_each_number_of_workers_are_identical_and_those_without_cores_are_marked(
    text: str, tmp_path: Path
) -> None:
    cores = os.cpu_count() or 1
    data = (f"data.train={text}/train", f"data.validation={text}/validation", f"workers.cpus={cores}")
    command = [
        *(sys.executable, "-m", "undula.cli", "bench", "scaling", str(JOB), *data, *SMALL, "--runs", str(tmp_path)),
        *("--workers", "1,2", "--rounds", "1", "--steps", "8", "--warmup", "2", "--against", OTHER),
        *("--page", str(tmp_path / "page.html"), "--json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [size["workers"] for size in found["sizes"]] == [1, 2]
    assert [size["is_oversubscribed"] for size in found["sizes"]] == [False, True]
    assert found["same"]["identical"], found["same"]
    assert (
        "of 10 steps and 1 digest of the weights are equal bit for bit on 1 and 2 workers" in found["same"]["sentence"]
    )
    for size in found["sizes"]:
        assert set(size["seconds"]) == set(CLASSES)
        assert size["seconds"]["compute"] > 0
        assert sum(size["seconds"].values()) * size["throughput"]["median"] == pytest.approx(24)
        assert size["baseline"]["median"] == pytest.approx(48 * size["workers"])
    assert found["sizes"][1]["seconds"]["communication"] > 0
    assert "two numbers of workers for which there are enough cores" in found["no_fit"]
    assert found["environment"]["cores"] == str(cores)
    assert "2 workers: " in done.stderr
    html = (tmp_path / "page.html").read_text()
    assert all(f'data-key="{key}"' in html for key in ("throughput", "speedup"))
    assert html.count('class="share"') == 2


def report_of(sizes: tuple[int, ...]) -> Scaling:
    rounds = []
    for workers in sizes:
        for number in (1, 2):
            step_s = (0.1 + 0.9 / workers) * (1 + 0.02 * number)
            parts = {"compute": 0.8, "communication": 0.1, "waiting": 0.05, "data": 0.0, "boundary": 0.05}
            seconds = {name: part * step_s for name, part in parts.items()}
            rounds.append(Round(number, workers, 32 / step_s, 32.0, seconds))
    others = [Round(each.number, each.workers, 0.9 * each.samples_per_s, 32.0, {}) for each in rounds]
    return scaling_of("a-job</script>", False, 60, rounds, sizes[3:], {"cores": "4"}, others)


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1600, "light")])
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (2,)])
def test_the_page_has_its_plots_and_bars_at_any_width(
    browser: Browser, tmp_path: Path, width: int, scheme: str, sizes: tuple[int, ...]
) -> None:
    page_file = tmp_path / "page.html"
    page_file.write_text(render_scaling(report_of(sizes), Sameness(True, "All are equal."), "torchrun {workers}"))
    with opened_in(browser, page_file, width, scheme) as opened:
        for key in ("throughput", "speedup"):
            figure = opened.page.locator(f"figure[data-key={key}]")
            own, others = (figure.locator(f".plot .glyph.{css}").count() for css in ("o-own", "o-other"))
            assert (own, others) == (len(sizes), len(sizes) if key == "throughput" else 0)
            assert figure.locator(".plot .interval").count() == (len(sizes) > 1)
            assert figure.locator(".plot .hollow").count() == len(sizes[3:]) * (2 if key == "throughput" else 1)
        assert opened.page.locator("svg.share").count() == len(sizes)
        assert "All are equal." in opened.page.locator("main").inner_text()
        opened.assert_fits_and_is_quiet()
