"""Output of `undula ls` and `undula show`: tables and small plots for a terminal, or JSON for programs."""

import json as json_format
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from undula.errors import UndulaError
from undula.report.data.comparison import Comparison
from undula.report.data.cost import Cost, PriceFinder, cost_of
from undula.report.data.run_record import leaves, read_run
from undula.report.data.selection import Selection, Values
from undula.report.data.summary import SECONDS_CLASSES, RunSummary, State, summarize, without_nan
from undula.report.render.cost_text import COST_LABELS, cost_lines
from undula.report.render.plots import loss_plot, speed_plot
from undula.report.text import DASH, counted, dollars, duration, goodput_text, number, printable
from undula.state.directory import JOB_FILE, STUDY_FILE
from undula.state.events import Event
from undula.state.ledger_files import LEDGER
from undula.storage import Entry, Store

READERS = 8
"""Maximum number of runs that are read at once."""
EVENTS_SHOWN = 12
"""Maximum number of events in `undula show`."""
ROUTINE_KINDS = ("checkpoint", "validation", "loss", "snapshot")
"""Kinds of events that are left out first if there are too many events."""
SIDE_BY_SIDE_WIDTH = 110
"""Minimum width of a terminal, in characters, for two tables or plots side by side."""
RUN_COLUMNS = ("run", "state", "step", "val. loss", "samples/s", "when")
TEXT_COLUMNS = RUN_COLUMNS[:2]
"""Columns that are aligned to the left."""
SHOWN_KEYS = ("run", "name", "state", "steps", "total_steps", "last_validation_loss", "samples_per_s", "latest")
"""Keys of a selection that these columns show."""
_GAP = "   "
_BAR_CELLS = 24
_STATE_STYLE = {
    "finished": "green",
    "failed": "red",
    "running": "cyan",
    "stopped": "yellow",
    "pending": "cyan",
    "unreadable": "red",
}
_KIND_STYLE = {
    "crash": "red",
    "fail": "red",
    "notice": "yellow",
    "warning": "yellow",
    "resize": "magenta",
    "skip": "yellow",
    "end": "green",
    "start": "cyan",
}
_CLASS_STYLE = {"compute": "blue", "communication": "magenta", "data": "yellow", "transfer": "cyan", "other": "white"}
_SPENT_STYLE = {
    "useful": "green",
    "replayed": "red",
    "restarting": "cyan",
    "checkpoint": "white",
    "data": "yellow",
    "capacity": "magenta",
}


def print_runs(
    store_of_runs: Store,
    json: bool = False,
    selection: Selection | None = None,
    *,
    jobs: Mapping[str, State] = MappingProxyType({}),
    now: float | None = None,
    console: Console | None = None,
) -> None:
    """Print the runs below a path or URL, by default newest first. Runs that cannot be read come last, with the reason.

    Args:
        store_of_runs: Folder of the runs.
        json: Whether to print JSON.
        selection: Conditions and order of the runs.
        jobs: States of the jobs that a cluster runs now, by the folder of their run. They come before what the ledgers say.
        now: Time in seconds since the epoch; by default the current time.
        console: Console to print on.

    Raises:
        SpecError: No run has a key of the selection.
    """
    now = time.time() if now is None else now
    selection = selection or Selection()
    summaries: dict[str, RunSummary] = {}
    values: dict[str, Values] = {}
    unreadable: list[str] = []
    entries = store_of_runs.list(unreadable=unreadable)
    reasons = {folder: f"{store_of_runs.url}/{folder} is not readable" for folder in unreadable}
    studies = _folders_with(entries, STUDY_FILE)
    folders = _folders_with(entries, JOB_FILE, LEDGER)
    with ThreadPoolExecutor(READERS, thread_name_prefix="undula-runs") as threads:
        for folder, summarized in zip(
            folders, threads.map(lambda folder: _summary_of(store_of_runs / folder, now), folders), strict=True
        ):
            if isinstance(summarized, UndulaError):
                reasons[folder] = str(summarized)
            else:
                summary, spec = summarized
                summaries[folder] = replace(summary, state=jobs.get(folder, summary.state))
                values[folder] = dict(leaves({"run": folder, **spec, **summaries[folder].as_json()}))
    unseen = _without_directory(jobs, {*folders, *studies}, selection)
    newest_first = sorted(summaries, key=lambda folder: -(summaries[folder].latest or 0.0))
    chosen = selection.of({folder: values[folder] for folder in newest_first})
    if json:
        rows = [{"run": folder, **summaries[folder].as_json()} for folder in chosen]
        rows += [{"run": folder, "state": jobs[folder]} for folder in unseen]
        _print_json([*rows, *({"run": folder, "error": reason} for folder, reason in reasons.items())])
        return
    console = console or Console()
    if not (chosen or reasons or studies or unseen):
        which = f"none of the {len(summaries)} runs" if summaries else "no runs"
        console.print(Text(f"{which} below {store_of_runs.url}" + (" is selected" if summaries else "")))
        return
    if chosen or reasons:
        more = [key for key in selection.keys if key not in SHOWN_KEYS]
        rows_of_text = [
            (*_run_row(folder, summaries[folder], now), *(_shown(values[folder].get(key)) for key in more))
            for folder in chosen
        ]
        rows_of_text += [(printable(folder), "unreadable", *[DASH] * (4 + len(more))) for folder in reasons]
        console.print(_runs_table((*RUN_COLUMNS, *map(printable, more)), rows_of_text, console.width))
    notes = _notes({folder: summaries[folder] for folder in chosen})
    notes += [f"{folder} is {jobs[folder]} and has no directory yet" for folder in unseen]
    notes += [f"unreadable: {reason}" for reason in reasons.values()]
    for folder in studies:
        url = printable(f"{store_of_runs.url.rstrip('/')}/{folder}")
        # Users copy this command, so it must stay on one line.
        console.print(Text(f"{printable(folder)} is a study; use `undula study status {url}`"), soft_wrap=True)
    for note in notes:
        console.print(Text(printable(note)))


def _summary_of(store: Store, now: float) -> tuple[RunSummary, Mapping[str, Any]] | UndulaError:
    """Return the summary of a run and the spec of its job, or the error with which reading it failed."""
    try:
        run = read_run(store)
    except UndulaError as error:
        return error
    return summarize(run.ledger, run.job, now, run.has_driver), run.job.spec


def _notes(chosen: Mapping[str, RunSummary]) -> list[str]:
    """Return what runs wait for, and why they failed, by the folder of the run."""
    waiting = [f"{folder}: {summary.waiting}" for folder, summary in chosen.items() if summary.waiting]
    return waiting + [f"{folder} failed: {summary.failure}" for folder, summary in chosen.items() if summary.failure]


def print_comparison(comparison: Comparison, *, console: Console | None = None) -> None:
    """Print the settings in which runs differ, and whether runs of one plan are the same training."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", style="dim", overflow="fold")
    for run in comparison.runs:
        table.add_column(printable(run.label), overflow="fold")
    for key, values in comparison.settings:
        table.add_row(Text(printable(key)), *(Text(printable(value, 60)) for value in values))
    lines: list[RenderableType] = [table if comparison.settings else Text("the jobs have the same settings")]
    for pair in comparison.agreements:
        difference = pair.certificate.difference
        what = f"different: {difference}" if difference else "; ".join(pair.certificate.proved) or "not proved"
        if rest := "" if difference else "; ".join(pair.certificate.not_proved):
            what += f"; not proved: {rest}"
        lines.append(Text(printable(f"{pair.label} and {pair.against}: {what}"), style="red" if difference else ""))
    if comparison.alone:
        lines.append(Text(printable(f"with a plan or data of their own: {', '.join(comparison.alone)}")))
    (console or Console()).print(Group(*lines))


def _without_directory(jobs: Mapping[str, State], known: Set[str], selection: Selection) -> list[str]:
    """Return the selected folders of jobs whose driver has not written a directory yet."""
    return [
        folder
        for folder, state in jobs.items()
        if folder not in known and selection.has({"run": folder, "name": folder, "state": state})
    ]


def print_run(
    store: Store,
    json: bool = False,
    prices: PriceFinder | None = None,
    *,
    now: float | None = None,
    console: Console | None = None,
) -> None:
    """Print the figures, cost, curves and newest events of a run, and how its steps spent their time."""
    run = read_run(store)
    summary = summarize(run.ledger, run.job, time.time() if now is None else now, run.has_driver)
    cost = cost_of(run, prices) if prices else None
    if json:
        shown = [event.row() | {"data": event.data} for event in run.events[-EVENTS_SHOWN:]]
        spent = cost.as_json() if cost else None
        _print_json({**summary.as_json(), "cost": spent, "plan_digest": run.job.plan_digest, "events": shown})
        return
    console = console or Console()
    is_wide = console.width >= SIDE_BY_SIDE_WIDTH
    console.print(Text.assemble((printable(summary.name), "bold"), "  ", _state_text(summary.state)))
    if summary.failure:
        console.print(Text(f"training failed: {printable(summary.failure)}", "red"))
    console.print(run_tables(summary, cost, console.width))
    if not len(run.ledger.steps):
        console.print(Text("\nno step has been committed yet"))
    elif console.encoding.startswith("utf"):
        width = (console.width - 4) // 2 if is_wide else min(console.width, 100)
        console.print(_beside([loss_plot(run, width), speed_plot(run, width)], is_wide))
    console.print(_events_table(run.events))


def run_tables(summary: RunSummary, cost: Cost | None, width: int) -> RenderableType:
    """Return the figures of a run as tables for a terminal of `width` characters."""
    figures = _beside([_summary_table(summary), _seconds_table(summary)], width >= SIDE_BY_SIDE_WIDTH)
    return Group(figures, *(_cost_tables(cost) if cost else ()))


def _beside(parts: Sequence[RenderableType], is_wide: bool) -> RenderableType:
    if not is_wide:
        return Group(*parts)
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_column()
    grid.add_column(no_wrap=True)  # if there is not enough room, the text of the first part wraps
    grid.add_row(*parts)
    return grid


def _run_row(folder: str, summary: RunSummary, now: float) -> tuple[str, ...]:
    """Return the cells of RUN_COLUMNS for a run."""
    return (
        printable(folder),
        summary.state,
        f"{summary.steps}/{summary.total_steps}",
        number(summary.last_validation_loss),
        number(summary.samples_per_s, 3),
        _ago(summary.latest, now),
    )


def _shown(value: object) -> str:
    """Return a figure or a setting as the text of a cell."""
    if value is None:
        return DASH
    return f"{value:.6g}" if isinstance(value, float) else printable(json_format.dumps(value).strip('"'), 40)


def _runs_table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> RenderableType:
    """Return a table with one line for each run, or with two lines if the columns do not fit into `width` characters."""
    widths = [max(map(cell_len, cells)) for cells in zip(head, *rows, strict=True)]
    is_stacked = sum(widths) + len(_GAP) * len(widths) > width
    columns, indent = (head[1:], _GAP) if is_stacked else (head, "")
    shown = widths[-len(columns) :]
    rule = "─" * (len(indent) + sum(shown) + len(_GAP) * (len(shown) - 1))
    lines = [Text(f" {head[0]}", "bold")] if is_stacked else []
    lines += [Text(f" {indent}").append_text(_run_line(columns, columns, shown)), Text(f" {rule}", "dim")]
    for row in rows:
        lines += [Text(f" {row[0]}", overflow="fold")] if is_stacked else []
        lines.append(Text(f" {indent}").append_text(_run_line(columns, row[-len(columns) :], shown)))
    return Group(Text(""), *lines, Text(""))


def _run_line(columns: Sequence[str], cells: Sequence[str], widths: Sequence[int]) -> Text:
    """Return the aligned cells of a run or of the table's head."""
    parts = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        style = "bold" if cell == column else _STATE_STYLE[cell] if column == "state" else ""
        text, room = Text(cell, style), Text(" " * (width - cell_len(cell)))
        parts.append(text + room if column in TEXT_COLUMNS else room + text)
    return Text(_GAP).join(parts)


def _summary_table(summary: RunSummary) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    best = summary.best_validation_loss
    at = f"  (best {number(best)} at step {summary.best_validation_step:,})" if best is not None else ""
    losses = f"{number(summary.first_validation_loss)} → {number(summary.last_validation_loss)}{at}"
    replayed = f", {summary.replayed_steps:,} replayed" if summary.replayed_steps else ""
    skipped = f", {summary.skipped_steps:,} without an update (fp16 overflow)" if summary.skipped_steps else ""
    faults = f"{counted(summary.crashes, 'crash', 'crashes')}, {counted(summary.resizes, 'resize')}"
    expected = summary.estimates.lines() if summary.estimates else ()
    for label, value in (
        ("validation loss", losses if summary.last_validation_loss is not None else DASH),
        *(
            (f"  {printable(name, 40)}", f"{number(value)}  (last validation)")
            for name, value in summary.validation_metrics.items()
        ),
        ("training loss", f"{number(summary.training_loss)}  (mean of the last 20 steps)"),
        ("steps", f"{summary.steps:,} of {summary.total_steps:,}{replayed}{skipped}"),
        ("samples", f"{summary.samples:,} of {summary.total_samples:,}"),
        ("samples/s", f"{number(summary.samples_per_s)}  (median)"),
        *((label, f"{value}  ({note})") for label, value, note in expected),
        ("wall time", duration(summary.wall_s)),
        ("attempts", f"{summary.attempts}  ({faults})"),
        ("goodput", goodput_text(summary.rank_seconds)),
        ("checkpoints", f"{summary.checkpoints:,}"),
        ("world sizes", ", ".join(map(str, summary.world_sizes)) or DASH),
        *([("sharding", f"stage {summary.sharding_stage}")] if summary.sharding_stage else []),
    ):
        table.add_row(label, Text(value))
    return table


def _seconds_table(summary: RunSummary) -> Table:
    labels = {name: name for name in SECONDS_CLASSES}
    amounts = {name: duration(summary.seconds[name]) for name in SECONDS_CLASSES}
    return _shares_table(("time in the steps", "total"), labels, summary.seconds, amounts, _CLASS_STYLE, ".0%")


def _cost_tables(cost: Cost) -> list[RenderableType]:
    lines = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(overflow="fold")
    for label, value in cost_lines(cost):
        lines.add_row(label, Text(value, style="yellow" if label in ("without a price", "note") else ""))
    if not cost.total:
        return [lines]
    amounts = {name: dollars(amount) for name, amount in cost.dollars.items()}
    return [lines, _shares_table(("dollars for", ""), COST_LABELS, cost.dollars, amounts, _SPENT_STYLE, ".1%")]


def _shares_table(
    head: tuple[str, str],
    labels: Mapping[str, str],
    values: Mapping[str, float],
    amounts: Mapping[str, str],
    styles: Mapping[str, str],
    share_format: str,
) -> Table:
    """Return a table of the parts of a whole, with a bar in each row."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(head[0], style="dim", no_wrap=True)
    table.add_column(head[1], justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("")
    total = sum(values.values())
    for name, label in labels.items():
        share = values[name] / total if total else 0.0
        table.add_row(
            label, amounts[name], f"{share:{share_format}}", Text("█" * round(share * _BAR_CELLS), styles[name])
        )
    return table


def _events_table(events: Sequence[Event]) -> RenderableType:
    """Return a table of the newest events. If there are too many, events of ROUTINE_KINDS are left out first."""
    if not events:
        return Padding(Text("the run has no events yet"), (1, 0))
    others = [event for event in events if event.kind not in ROUTINE_KINDS] if len(events) > EVENTS_SHOWN else events
    shown = others[-EVENTS_SHOWN:]
    title = (
        f"{len(shown)} of {len(events)} events; `undula report` shows the others" if len(shown) < len(events) else None
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=title, caption_justify="left")
    table.add_column("time", no_wrap=True, style="dim")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("event", overflow="fold")
    for event in shown:
        when = datetime.fromtimestamp(event.time).strftime("%m-%d %H:%M:%S")
        message = Text(printable(event.message), style=_KIND_STYLE.get(event.kind, ""))
        table.add_row(when, DASH if event.step is None else f"{event.step:,}", message)
    return table


def _state_text(state: str) -> Text:
    return Text(state, style=_STATE_STYLE[state])


def _ago(when: float | None, now: float) -> str:
    if when is None:
        return DASH
    sizes = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    unit, size = next(((unit, size) for unit, size in sizes if now - when >= 2 * size), ("s", 1))
    return "just now" if now - when < 5 else f"{int((now - when) // size)} {unit} ago"


def _folders_with(entries: Iterable[Entry], *names: str) -> list[str]:
    """Return the folders directly below a store that contain a file or folder with one of the names."""
    parts = [entry.name.split("/", 2) for entry in entries]
    return sorted({part[0] for part in parts if len(part) > 1 and part[1] in names})


def _print_json(document: object) -> None:
    print(json_format.dumps(without_nan(document), indent=1), flush=True)
