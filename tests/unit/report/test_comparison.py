"""Tests of the comparison of runs: the settings that differ, verified equality, and the command that writes its page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from priced_run import at, write_priced_run
from report_rows import step_of

from undula.cli.compare import compare
from undula.cli.ls import ls
from undula.cluster.prices import load_prices
from undula.errors import SpecError
from undula.report.data.comparison import compare as compared
from undula.report.data.cost import cost_of, dollars_at
from undula.report.data.run_record import read_run
from undula.report.data.summary import column
from undula.report.render.comparison import render_comparison
from undula.state.events import EndEvent, StartEvent, ValidationEvent
from undula.state.ledger import EventWriter, LedgerWriter
from undula.storage import Store

EVIL = "</script><script>alert(1)</script>"


def write_run(store: Store, losses: Sequence[float], plan: str = "p", **settings: Any) -> Store:
    """Write a run with these losses, and with a validation after each step."""
    spec = {"name": store.url, "schedule": {"base_lr": 0.1, "decay": "cosine"}, **settings}
    job = {"name": "run", "plan_digest": plan, "total_steps": len(losses), "spec": spec}
    store.write("job.json", json.dumps(job).encode())
    events, ledger = EventWriter(store, "test"), LedgerWriter(store, 1)
    events.event(StartEvent(1, 1, step=0, time=1000.0))
    for step, loss in enumerate(losses):
        ledger.step(step_of(step, world_size=1, loss=loss, sample_digest=step, time=1001.0 + step))
        events.event(ValidationEvent(loss, 9, {"accuracy": 1 / loss}, step=step + 1, time=1001.5 + step))
    ledger.close()
    events.event(EndEvent(step=len(losses), time=2000.0))
    return store


def test_settings_that_differ_are_listed_and_runs_of_one_plan_are_compared(tmp_path: Path) -> None:
    stores = {
        "one": write_run(Store(f"{tmp_path}/one"), [3.0, 2.0]),
        "same": write_run(Store(f"{tmp_path}/same"), [3.0, 2.0], workers={"max": 2}),
        "other": write_run(Store(f"{tmp_path}/other"), [3.0, 2.1]),
        "alone": write_run(Store(f"{tmp_path}/alone"), [3.0], "q", schedule={"base_lr": 0.2}),
    }
    found = compared({label: read_run(store) for label, store in stores.items()}, 3000.0, lambda events: load_prices())
    assert dict(found.settings) == {
        "schedule.base_lr": ("0.1", "0.1", "0.1", "0.2"),
        "schedule.decay": ('"cosine"', '"cosine"', '"cosine"', "–"),
        "workers.max": ("–", "2", "–", "–"),
    }
    same, other = found.agreements
    assert (same.label, same.against, same.certificate.difference) == ("same", "one", None)
    assert same.certificate.proved == [
        "2 steps as in run: the same samples and learning rates, with identical losses",
        "2 validations as in run",
    ]
    assert (other.label, other.against) == ("other", "one")
    assert str(other.certificate.difference).startswith("step 1 has loss 2.1, but run has 2")
    assert found.alone == ("alone",)
    html = render_comparison(found)
    for text in (
        "same and one are the same training",
        "other and one differ",
        "alone has a plan or data that no other",
    ):
        assert text in html
    assert html.index("same and one are the same training") < html.index('data-chart="loss"'), "the verdict comes first"
    chart = html.split('data-chart="world_size"')[1].split("</svg></svg>")[0]
    assert chart.index("curve r-first") < chart.index("curve r-1") < chart.index("curve r-2"), "below the others"


def test_text_of_the_runs_cannot_become_markup(tmp_path: Path) -> None:
    stores = [write_run(Store(f"{tmp_path}/{name}"), [3.0], config={EVIL: name + EVIL}) for name in ("one", "two")]
    records = {EVIL + store.url[-3:]: read_run(store) for store in stores}
    html = render_comparison(compared(records, 3000.0, lambda events: load_prices()))
    assert "<script>alert" not in html
    assert html.count("<script") == html.count("</script>") == 2


def test_dollars_over_time_end_at_the_cost_of_the_run(tmp_path: Path) -> None:
    write_priced_run(Store(str(tmp_path)))
    run, prices = read_run(Store(str(tmp_path))), load_prices()
    total = cost_of(run, lambda events: prices)
    assert total is not None
    times = column(run.ledger.steps, "time")
    spent = dollars_at(run, lambda events: prices, np.array([0.0, at(0), *times, at(240)]))
    assert spent is not None
    assert (np.diff(spent) >= 0).all()
    assert spent[0] == spent[1] == 0.0
    assert spent[-1] == pytest.approx(total.total)


def test_the_command_writes_the_page_and_prints_json(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(Store(f"{tmp_path}/{name}"), [3.0, 2.0])
    out = tmp_path / "new" / "page.html"
    shown = CliRunner().invoke(compare, ["one", "two", "--runs", str(tmp_path), "--out", str(out), "--json"])
    assert shown.exit_code == 0, shown.exception
    found = json.loads(shown.output)
    assert [run["run"] for run in found["runs"]] == ["one", "two"]
    assert found["agreements"][0]["holds"]
    assert found["page"] == str(out)
    assert "<title>one · two · Undula</title>" in out.read_text()
    for names in (["one"], ["one", "one"]):
        refused = CliRunner().invoke(compare, [*names, "--runs", str(tmp_path)])
        assert isinstance(refused.exception, SpecError)


def test_runs_on_s3_are_selected_sorted_and_compared(s3: Any) -> None:
    for name, losses in (("one", [3.0, 2.0]), ("two", [3.0, 1.0]), ("three", [3.0])):
        write_run(Store(s3.url(f"runs/{name}")), losses)
    listed = CliRunner().invoke(ls, [s3.url("runs"), "--where", "steps=2", "--sort", "best_validation_loss", "--json"])
    assert listed.exit_code == 0, listed.exception
    assert [run["run"] for run in json.loads(listed.output)] == ["two", "one"]
    shown = CliRunner().invoke(ls, [s3.url("runs"), "--sort", "-validation_metrics.accuracy"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.exception
    lines = [line.split() for line in shown.output.splitlines() if line.startswith((" t", " o"))]
    assert [(line[0], line[-1]) for line in lines] == [("two", "1"), ("one", "0.5"), ("three", "0.333333")]
    urls = [s3.url(f"runs/{name}") for name in ("one", "two")]
    written = CliRunner().invoke(compare, [*urls, "--out", s3.url("pages/compare.html")])
    assert written.exit_code == 0, written.exception
    assert b"one and two" not in Store(s3.url("pages")).read("compare.html")
    assert b"two and one differ" in Store(s3.url("pages")).read("compare.html")
