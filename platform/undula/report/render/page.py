"""Report of a run: one HTML file with its figures, curves, cost, events and spec. The page makes no network requests."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime

import yaml

from undula.report.data.cost import Cost, PriceFinder, cost_of
from undula.report.data.curves import MARKED_KINDS, markers_of
from undula.report.data.run_record import RecordedRun, read_run
from undula.report.data.summary import RunSummary, summarize
from undula.report.render.cost_text import COST_LABELS, cost_lines
from undula.report.render.html import SHARED_PACKAGE, Tile, render_page, shares_of
from undula.report.render.run_charts import Axes, charts_of, tooltip_data, x_axis
from undula.report.text import DASH, counted, dollars, duration, goodput_text, number, printable
from undula.state.directory import REPORT
from undula.state.events import Event
from undula.storage import Store, write_file

TABLE_EVENTS = 400
"""Maximum number of events in the table."""


def write_report(
    store: Store, prices: PriceFinder | None = None, *, now: float | None = None, out: str | None = None
) -> str:
    """Write the report of a run.

    Args:
        store: The run directory.
        prices: Prices for the cost section; without them, the report has none.
        now: Time in seconds since the epoch; by default the current time.
        out: Path or URL of the report; by default report.html in the run directory.

    Returns:
        The path or URL of the report.
    """
    run = read_run(store)
    summary = summarize(run.ledger, run.job, time.time() if now is None else now, run.has_driver)
    cost = cost_of(run, prices) if prices else None
    out = out or f"{store.url.rstrip('/')}/{REPORT}"
    write_file(out, render(run, summary, cost).encode())
    return out


def render(run: RecordedRun, summary: RunSummary, cost: Cost | None = None) -> str:
    """Return the report as HTML."""
    began = summary.began or 0.0
    markers = markers_of(run.events, run.ledger.steps, began)
    kinds = {marker.event.kind for marker in markers}
    charts, left_out = charts_of(run, began)
    events, events_note = _shown_events(run.events)
    axes: Axes = {
        "time": x_axis("time", max(summary.wall_s, 1e-3)),
        "samples": x_axis("samples", float(max(summary.samples, 1))),
    }
    context = {
        "name": printable(run.job.name),
        "state": summary.state,
        "facts": _facts(run, summary),
        "tiles": _tiles(summary),
        "views_of_charts": [
            (name, [chart.over(name, axis, markers) for chart in charts]) for name, axis in axes.items()
        ],
        "event_kinds": [kind for kind in MARKED_KINDS if kind in kinds],
        "marked_kinds": MARKED_KINDS,
        "left_out": left_out,
        "has_curves": bool(charts),
        "seconds": shares_of(summary.seconds, "c-", {}, duration),
        "goodput": goodput_text(summary.rank_seconds),
        "cost_shares": shares_of(cost.dollars, "g-", COST_LABELS, dollars) if cost and cost.total else (),
        "cost_lines": cost_lines(cost) if cost else (),
        "events": events,
        "events_note": events_note,
        "spec": yaml.safe_dump(dict(run.job.spec), sort_keys=False, allow_unicode=True),
        "latest": None if summary.latest is None else " ".join(_utc(summary.latest)),
        "data": tooltip_data(charts, axes, markers),
    }
    return render_page("run.html", context, package=SHARED_PACKAGE, script="run.js")


def _facts(run: RecordedRun, summary: RunSummary) -> list[str]:
    """Return the facts in the line below the title."""
    sizes = summary.world_sizes
    facts = (
        f"started {' '.join(_utc(summary.began))} UTC" if summary.began is not None else "not started yet",
        f"{sizes[0]}–{sizes[-1]} ranks" if len(sizes) > 1 else f"world size {sizes[0]}" if sizes else "",
        f"{run.job.train_rows:,} training samples" if run.job.train_rows else "",
        f"plan {printable(run.job.plan_digest)[:12]}" if run.job.plan_digest else "",
    )
    return [fact for fact in facts if fact]


def _tiles(summary: RunSummary) -> list[Tile]:
    best = summary.best_validation_loss
    best_note = f"best {number(best)} at step {summary.best_validation_step:,}" if best is not None else "no validation"
    faults = f"{counted(summary.crashes, 'crash', 'crashes')}, {counted(summary.resizes, 'resize')}"
    skipped = f", {summary.skipped_steps:,} without an update (fp16 overflow)" if summary.skipped_steps else ""
    return [
        Tile("validation loss", number(summary.last_validation_loss), best_note),
        *(
            Tile(printable(name, 40), number(value), "last validation")
            for name, value in summary.validation_metrics.items()
        ),
        Tile("training loss", number(summary.training_loss), "mean of the last 20 steps"),
        Tile("steps", f"{summary.steps:,}", f"of {summary.total_steps:,}{skipped}"),
        Tile("samples", f"{summary.samples:,}", f"of {summary.total_samples:,}"),
        Tile("samples/s", number(summary.samples_per_s), "median over steps"),
        Tile("wall time", duration(summary.wall_s), counted(summary.checkpoints, "checkpoint")),
        Tile("replayed steps", f"{summary.replayed_steps:,}", "lost and run again"),
        Tile("attempts", f"{summary.attempts:,}", faults),
        *(Tile(*line) for line in (summary.estimates.lines() if summary.estimates else ())),
    ]


def _shown_events(events: Sequence[Event]) -> tuple[list[tuple[str, ...]], str]:
    """Return the rows of the newest events, and a remark on the others. If there are too many, checkpoints are left out first."""
    others = [event for event in events if event.kind != "checkpoint"] if len(events) > TABLE_EVENTS else events
    rows: list[tuple[str, ...]] = []
    for event in others[-TABLE_EVENTS:]:
        step = DASH if event.step is None else f"{event.step:,}"
        rows.append((*_utc(event.time), step, printable(event.kind, 20), printable(event.message)))
    if len(rows) < len(events):
        return rows, f"The ledger has {counted(len(events) - len(rows), 'more event')}."
    return rows, "" if events else "The run has no events yet."


def _utc(when: float) -> tuple[str, str]:
    """Return the day and the time of day of a time in seconds since the epoch."""
    at = datetime.fromtimestamp(when, UTC)
    return f"{at:%Y-%m-%d}", f"{at:%H:%M:%S}"
