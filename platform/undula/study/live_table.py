"""Progress of a study in the terminal: a line for each trial that ends, and a table that is redrawn."""

import io
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from operator import itemgetter
from statistics import fmean
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from undula.study.seeds import common_seeds
from undula.study.spec import StudySpec
from undula.study.trials import State, Trial, TrialRecord
from undula.telemetry.messages import clock

INTERVAL_S = 5.0
"""Time in seconds between two drawings of the table."""
MIN_WIDTH, MAX_WIDTH = 80, 200
"""Minimum and maximum width of the table in characters."""
MAX_ROWS = 24
"""Maximum number of rows of the table."""
LOST: tuple[State, ...] = ("stopped", "diverged", "failed")
"""States that have their own column if a trial is in them."""
_BAR_WIDTH = 8


def share_done(spec: StudySpec, record: TrialRecord) -> float:
    """Return the share of a trial's samples that it has consumed, from 0 to 1."""
    return 1.0 if record.has_ended else min(record.samples / (spec.samples or inf), 1.0)


def seconds_left(spec: StudySpec, records: Sequence[TrialRecord]) -> float | None:
    """Return the estimated seconds until all trials have ended, from the pace of trials with the same batch; None if there is none."""
    by_batch: dict[int, list[float]] = {}
    for record in records:
        if record.samples and record.seconds:
            by_batch.setdefault(record.trial.batch, []).append(record.seconds / record.samples)
    if not by_batch:
        return None
    paces = {batch: sum(durations) / len(durations) for batch, durations in by_batch.items()}
    usual = sum(paces.values()) / len(paces)
    left = sum(
        (1 - share_done(spec, record)) * (spec.samples or 0) * paces.get(record.trial.batch, usual)
        for record in records
        if not record.has_ended
    )
    return left / max(sum(record.state == "running" for record in records), 1)


def summary(spec: StudySpec, records: Sequence[TrialRecord], is_running: bool = True) -> str:
    """Return a line such as `34 of 96 trials, 2 running, 12:07 left`, or `34 of 96 trials, not running`."""
    ended, running = sum(record.has_ended for record in records), sum(record.state == "running" for record in records)
    parts = [f"{ended} of {len(records)} trials"]
    if not is_running and ended < len(records):
        return f"{parts[0]}, not running"
    if running:
        parts.append(f"{running} running")
    if (left := seconds_left(spec, records)) is not None and ended < len(records):
        parts.append(f"{clock(left)} left")
    return ", ".join(parts)


def study_table(spec: StudySpec, records: Iterable[TrialRecord], is_last: bool = False, is_running: bool = True) -> str:
    """Return the table as text, with a row for each combination of optimizer, rule, warmup and batch.

    Args:
        spec: The study.
        records: Records of its trials.
        is_last: Whether the table is final, so that no other one is drawn over it.
        is_running: Whether the driver of the study is running.
    """
    records = list(records)
    shown_states = [state for state in LOST if any(record.state == state for record in records)]
    cells: dict[tuple[Any, ...], list[TrialRecord]] = {}
    for record in records:
        trial = record.trial
        cells.setdefault((trial.optimizer, trial.rule, trial.warmup, trial.batch), []).append(record)
    table = Table(box=box.HEAVY_HEAD, min_width=MIN_WIDTH)
    varying = [len({key[place] for key in cells}) > 1 for place in range(3)]
    for name, is_shown in zip(("optimizer", "rule", "warmup"), varying, strict=True):
        if is_shown:
            table.add_column(name, no_wrap=True)
    steps = [f"steps to {spec.target:g}"] if spec.target is not None else []
    for name in ("batch", "", "trials", "running", "best rate", "loss", *steps, *shown_states):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for key, group in list(cells.items())[:MAX_ROWS]:
        shown = [str(value) for value, is_shown in zip(key[:3], varying, strict=True) if is_shown]
        table.add_row(*shown, str(key[3]), *_row(spec, group, shown_states))
    text = io.StringIO()
    Console(file=text, width=MAX_WIDTH, no_color=True).print(table)
    *lines, bottom = text.getvalue().rstrip("\n").split("\n")
    more = f", {len(cells) - MAX_ROWS} rows are not shown" if len(cells) > MAX_ROWS else ""
    foot = f"{'┗' if is_last else '└'}─ {spec.name}: {summary(spec, records, is_running)}{more} "
    return "\n".join([*lines, foot + bottom[len(foot) :]])


def _row(spec: StudySpec, group: Sequence[TrialRecord], shown_states: Sequence[State]) -> list[str]:
    """Return the cells of a row, starting with the bar."""
    count = {state: sum(record.state == state for record in group) for state in (*shown_states, "running")}
    done = sum(share_done(spec, record) for record in group) / len(group)
    bar = "█" * round(done * _BAR_WIDTH) + "░" * (_BAR_WIDTH - round(done * _BAR_WIDTH))
    best = best_of(group)
    row = [
        bar,
        f"{sum(record.has_ended for record in group)}/{len(group)}",
        str(count["running"] or ""),
        f"{best[0]:.3g}" if best else "",
        f"{best[1]:.4f}" if best else "",
    ]
    if spec.target is not None:
        fewest = fewest_steps(group, spec.target)
        row.append(f"{fewest:,.0f}" if fewest else "")
    return [*row, *(str(count[state] or "") for state in shown_states)]


def best_of(group: Iterable[TrialRecord]) -> tuple[float, float] | None:
    """Return the learning rate with the lowest mean loss over seeds, and that loss, or None if no rate has lowered its loss.

    Rates are compared over the seeds that they have in common. A rate of which a trial diverged or was stopped has no mean.
    """
    means = []
    for records in _over_common_seeds(group, ("diverged", "stopped"), lambda record: record.state == "complete"):
        loss = fmean(record.loss for record in records)
        if loss < fmean(record.curve[0].loss for record in records if record.curve):
            means.append((fmean(record.lr for record in records), loss))
    return min(means, key=itemgetter(1), default=None)


def fewest_steps(group: Iterable[TrialRecord], target: float) -> float | None:
    """Return the fewest mean steps to the target of all learning rates, or None if none has reached it with all compared seeds."""

    def is_judged(record: TrialRecord) -> bool:
        return record.state in ("complete", "stopped") or record.samples_to(target) < inf

    rates = _over_common_seeds(group, ("diverged",), is_judged)
    means = [fmean(trial.steps_to(target) for trial in records) for records in rates]
    return min((mean for mean in means if mean < inf), default=None)


def _over_common_seeds(
    group: Iterable[TrialRecord], excluded: Sequence[State], is_judged: Callable[[TrialRecord], bool]
) -> list[list[TrialRecord]]:
    """Return the judged trials of each learning rate with the seeds that the rates have in common, without rates with an excluded trial."""
    by_rate = [records for records in _by_rate(group) if not any(record.state in excluded for record in records)]
    judged = [{record.trial.seed: record for record in records if is_judged(record)} for records in by_rate]
    seeds = common_seeds(judged)
    return [[by_seed[seed] for seed in seeds] for by_seed in judged if seeds and set(seeds) <= set(by_seed)]


def _by_rate(group: Iterable[TrialRecord]) -> list[list[TrialRecord]]:
    """Return groups of trials that differ only in their seed. A measured rule gives each of them its own rate."""
    by_rate: dict[float, list[TrialRecord]] = {}
    for record in group:
        by_rate.setdefault(record.trial.base_lr, []).append(record)
    return list(by_rate.values())


def ended_line(records: Mapping[Trial, TrialRecord], record: TrialRecord) -> str:
    """Return the line of a trial that has ended, such as `12/96  sgd-none-b64-lr0.1-w0-s0  complete  loss 0.1234  0:12`."""
    ended = sum(trial.has_ended for trial in records.values())
    results: dict[State, str] = {"complete": f"loss {record.loss:.4f}", "stopped": f"after {record.samples:,} samples"}
    result = results.get(record.state, record.message)
    name = record.trial.name
    return f"{ended}/{len(records)}  {name}  {record.state}  {result}  {clock(record.seconds)}".rstrip()


class StudyScreen:
    """Printer of a line for each trial that ends, and of the table whenever it has changed.

    The client that follows a submitted study recognizes a table by its box-drawing characters, and draws it over the last one.

    Args:
        spec: The study.
        records: Records of the trials, which the driver updates.
        out: Stream to print to.
    """

    def __init__(self, spec: StudySpec, records: Mapping[Trial, TrialRecord], out: TextIO = sys.stdout):
        self._spec, self._records, self._out = spec, records, out
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._shown = ""
        self._thread = threading.Thread(target=self._draw_regularly, name="undula-study", daemon=True)

    def show(self, record: TrialRecord) -> None:
        """Print the line of a trial if it has ended."""
        if record.has_ended:
            self._print(ended_line(self._records, record))

    def __enter__(self) -> "StudyScreen":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join()
        self._draw(is_last=True)

    def _draw_regularly(self) -> None:
        self._draw()
        while not self._closed.wait(INTERVAL_S):
            self._draw()

    def _draw(self, is_last: bool = False) -> None:
        text = study_table(self._spec, list(self._records.values()), is_last)
        if text != self._shown:
            self._shown = text
            self._print(text)

    def _print(self, text: str) -> None:
        with self._lock:
            print(text, file=self._out, flush=True)
