"""What a run directory says, as figures: the arithmetic over the ledger that the terminal and the page share, and how figures are written.

All but `read_run` is pure.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from undula.errors import RunError, UndulaError
from undula.report.data.goodput import goodput
from undula.state.directory import JOB_FILE, STUDY_FILE
from undula.state.events import Event, StartEvent, ValidationEvent
from undula.state.ledger import Ledger, decode_events, read_ledger, steps_done
from undula.storage import Store

RUNNING_WITHIN_S = 60.0
TRAINING_LOSS_STEPS = 20
MARKED_KINDS = ("start", "resize", "crash", "notice", "checkpoint", "end")
SECONDS_CLASSES = ("compute", "communication", "data", "other")

State = Literal["finished", "running", "stopped"]
AxisName = Literal["time", "samples"]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class JobRecord:
    """The run directory's job.json: what was asked for."""

    name: str
    plan_digest: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """The resolved spec, as a tree, without the values of secrets."""
    total_steps: int = 0
    total_samples: int = 0
    train_rows: int = 0


@dataclass(frozen=True)
class Validation:
    """A validation of the run, at a number of committed steps."""

    step: int
    loss: float
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class RunSummary:
    """A run in figures. Losses are None where there is none; times are seconds since the epoch."""

    name: str
    state: State
    steps: int
    """Committed."""
    total_steps: int
    samples: int
    total_samples: int
    first_validation_loss: float | None
    last_validation_loss: float | None
    best_validation_loss: float | None
    best_validation_step: int | None
    training_loss: float | None
    """Mean of the last TRAINING_LOSS_STEPS committed steps."""
    samples_per_s: float | None
    """Median over committed steps."""
    began: float | None
    latest: float | None
    """When the newest event or step was told."""
    wall_s: float
    """From the first event to the newest event or step."""
    replayed_steps: int
    """Rows of the ledger that were done again; steps lost before they were flushed are not among them."""
    attempts: int
    crashes: int
    resizes: int
    checkpoints: int
    world_sizes: tuple[int, ...]
    """Seen, ascending."""
    seconds: Mapping[str, float]
    """By class of SECONDS_CLASSES, summed over committed steps, mean over ranks."""
    rank_seconds: Mapping[str, float]
    """By class of `undula.report.data.goodput`: every second of every rank."""
    goodput: float
    """Share of them that was useful."""

    def as_json(self) -> dict[str, Any]:
        """The summary for json.dumps; a loss that is not finite becomes null."""
        tree: dict[str, Any] = without_nan(asdict(self))
        return tree


@dataclass(frozen=True)
class RecordedRun:
    """A run directory, read."""

    job: JobRecord
    ledger: Ledger
    events: tuple[Event, ...]
    """In order of time."""


@dataclass(frozen=True)
class Places:
    """Where the points of a curve lie on either axis. Shapes [points]."""

    time: Floats
    """Seconds since the run began."""
    samples: Floats
    step: Floats
    """Steps committed."""
    attempt: Floats

    def take(self, rows: Indices) -> "Places":
        return Places(self.time[rows], self.samples[rows], self.step[rows], self.attempt[rows])

    def on(self, axis: AxisName) -> Floats:
        return self.time if axis == "time" else self.samples


@dataclass(frozen=True)
class Mark:
    """An event, placed on both axes."""

    event: Event
    time: float
    samples: float

    def on(self, axis: AxisName) -> float:
        return self.time if axis == "time" else self.samples


def read_run(store: Store) -> RecordedRun:
    """Read a run directory. Raises RunError where it is none, or is damaged."""
    if not store.exists(JOB_FILE):
        if store.exists(STUDY_FILE):
            raise RunError(
                f"{store.url} is a study: `undula study status` tells of it, and each of its trials/NAME is a run"
            )
        raise RunError(f"{store.url} has no {JOB_FILE}: give the directory of a run that `undula run` has started")
    try:
        job = _job_record(json.loads(store.read(JOB_FILE)))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{store.url}/{JOB_FILE} is damaged ({_reason(error)}): submit the job again") from error
    try:
        ledger = read_ledger(store)
        return RecordedRun(job, ledger, decode_events(ledger.events))
    except UndulaError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"the ledger of {store.url} is damaged ({_reason(error)}): remove the damaged file below ledger/"
        ) from error


def summarize(ledger: Ledger, job: JobRecord, now: float) -> RunSummary:
    """The figures of a run; `now` in seconds since the epoch."""
    events = decode_events(ledger.events)
    steps = ledger.steps
    kinds = [event.kind for event in events]
    times = [event.time for event in events] + column(steps, "time")[-1:].tolist()
    finite = [entry for entry in validations(events) if math.isfinite(entry.loss)]
    best = min(finite, key=lambda entry: entry.loss, default=None)
    told = validations(events)
    rate = throughput(steps)
    sizes = {*steps["world_size"].to_pylist(), *ledger.replaced["world_size"].to_pylist()}
    spent = goodput(ledger, events)
    return RunSummary(
        name=job.name,
        state=_state(kinds, max(times, default=None), now),
        steps=steps_done(steps),
        total_steps=job.total_steps,
        samples=int(steps["samples"][-1].as_py()) if len(steps) else 0,
        total_samples=job.total_samples,
        first_validation_loss=told[0].loss if told else None,
        last_validation_loss=told[-1].loss if told else None,
        best_validation_loss=best.loss if best else None,
        best_validation_step=best.step if best else None,
        training_loss=float(column(steps, "loss")[-TRAINING_LOSS_STEPS:].mean()) if len(steps) else None,
        samples_per_s=float(np.median(rate)) if len(rate) else None,
        began=min(times, default=None),
        latest=max(times, default=None),
        wall_s=max(times) - min(times) if times else 0.0,
        replayed_steps=len(ledger.replaced),
        attempts=kinds.count("start"),
        crashes=kinds.count("crash"),
        resizes=kinds.count("resize"),
        checkpoints=kinds.count("checkpoint"),
        world_sizes=tuple(sorted(int(size) for size in sizes)),
        seconds={name: float(column(steps, f"{name}_s").sum()) for name in SECONDS_CLASSES},
        rank_seconds=spent.seconds,
        goodput=spent.share,
    )


def validations(events: Sequence[Event]) -> tuple[Validation, ...]:
    """The validations that stand, by step: one of a step that a later attempt did again gives way to the later one."""
    standing: dict[int, Validation] = {}
    for event in events:
        if isinstance(event, StartEvent):
            standing = {step: entry for step, entry in standing.items() if step <= event.step}
        elif isinstance(event, ValidationEvent):
            standing[event.step] = Validation(event.step, event.loss, event.time)
    return tuple(standing[step] for step in sorted(standing))


def column(table: pa.Table, name: str) -> Floats:
    """A column as float64, null as NaN."""
    return np.asarray(table[name].to_numpy(), dtype=np.float64)


def throughput(steps: pa.Table) -> Floats:
    """Samples per second of each step."""
    seconds = np.sum([column(steps, f"{name}_s") for name in SECONDS_CLASSES], axis=0)
    rate: Floats = column(steps, "step_samples") / np.maximum(seconds, 1e-9)
    return rate


def places_of(steps: pa.Table, began: float) -> Places:
    """Where rows of STEP_SCHEMA lie."""
    time, samples, attempt = (column(steps, name) for name in ("time", "samples", "attempt"))
    return Places(time - began, samples, column(steps, "step") + column(steps, "merged_steps"), attempt)


def marks_of(events: Sequence[Event], steps: pa.Table, began: float) -> tuple[Mark, ...]:
    """Events of MARKED_KINDS. One without a step lies at the last step that was committed, to stay, before it."""
    times, done = column(steps, "time"), column(steps, "step") + column(steps, "merged_steps")
    samples = np.concatenate([[0.0], column(steps, "samples")])
    marks = []
    for event in events:
        if event.kind in MARKED_KINDS:
            at_step, at_time = np.searchsorted(done, event.step or 0, "right"), np.searchsorted(times, event.time)
            rows = at_time if event.step is None else at_step
            marks.append(Mark(event, event.time - began, float(samples[rows])))
    return tuple(marks)


def validation_curve(run: RecordedRun, began: float) -> tuple[Places, Floats]:
    """The validations whose step is committed, and their losses."""
    places = places_of(run.ledger.steps, began)
    samples_at = {0.0: 0.0, **dict(zip(places.step.tolist(), places.samples.tolist(), strict=True))}
    told = [entry for entry in validations(run.events) if entry.step in samples_at]
    rows = [(entry.time - began, samples_at[entry.step], float(entry.step), 0.0, entry.loss) for entry in told]
    time, samples, step, attempt, loss = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    return Places(time, samples, step, attempt), loss


def logged_values(steps: pa.Table) -> dict[str, Floats]:
    """What step.log(...) gave, by name, where any of it is finite; NaN where a step has none."""
    values: dict[str, Floats] = {}
    for row, text in enumerate(steps["logged"].to_pylist()):
        for name, value in json.loads(text).items() if text and text != "{}" else ():
            if isinstance(value, int | float):
                if name not in values:
                    values[name] = np.full(len(steps), np.nan)
                values[name][row] = value
    return {name: held for name, held in values.items() if np.isfinite(held).any()}


def downsample(ys: Floats, limit: int) -> Indices:
    """At most `limit` (4 or more) indices of ys, ascending, with the ends and the smallest and largest of each bucket."""
    if len(ys) <= limit:
        return np.arange(len(ys))
    edges = np.linspace(0, len(ys), (limit - 2) // 2 + 1).astype(np.int64)
    low, high = np.where(np.isfinite(ys), ys, np.inf), np.where(np.isfinite(ys), ys, -np.inf)
    kept = [0, len(ys) - 1]
    for start, stop in pairwise(edges.tolist()):
        kept += [start + int(low[start:stop].argmin()), start + int(high[start:stop].argmax())]
    return np.unique(np.array(kept))


def smooth(ys: Floats, window: int) -> Floats:
    """Mean of the finite values among the `window` (odd) around each; NaN where there is none.

    Towards the ends the window narrows around its point, down to a third, so that the curve neither lags there nor jumps.
    """
    finite, half = np.isfinite(ys), window // 2
    held = np.where(finite, ys, 0.0)
    around, ones = slice(half, half + len(ys)), np.ones(2 * half + 1)
    sums, counts = np.convolve(held, ones)[around], np.convolve(finite.astype(np.float64), ones)[around].round()
    for place in {*range(min(half, len(ys))), *range(max(len(ys) - half, 0), len(ys))}:
        reach = max(min(place, len(ys) - 1 - place), half // 3)
        near = slice(max(place - reach, 0), place + reach + 1)
        sums[place], counts[place] = held[near].sum(), finite[near].sum()
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def nice_step(span: float, about: int) -> float:
    """1, 2 or 5 times a power of ten, such that about `about` of it fill the span."""
    raw = span / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)


def ticks(low: float, high: float, step: float) -> list[float]:
    """The multiples of step within [low, high]."""
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """A tick's label: as many decimals as its step needs, large numbers with k or M."""
    if value == 0:
        return "0"
    if step < 1e-3:
        digits = max(math.floor(math.log10(abs(value))) - math.floor(math.log10(step)), 0)
        mantissa, _, power = f"{value:.{digits}e}".partition("e")
        return f"{mantissa}e{int(power)}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if step >= size / 10 and abs(value) >= size:
            return f"{value / size:.{max(-math.floor(math.log10(step / size) + 1e-9), 0)}f}{unit}"
    return f"{value:.{max(-math.floor(math.log10(step) + 1e-9), 0)}f}"


def number(value: float | None, digits: int = 4) -> str:
    """A figure to so many significant digits; a dash where there is none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(power)}"
    return f"{value:,.{max(digits - 1 - math.floor(math.log10(abs(value))), 0)}f}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """1 crash, 2 crashes."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """A span of time for a person: 0.4 s, 12 s, 5 min 03 s, 2 h 05 min, 3 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def goodput_words(summary: RunSummary) -> str:
    """`93 % of 1:20:11 of rank time; restarting 4 %, data 3 %`."""
    held = sum(summary.rank_seconds.values())
    if not held:
        return "–"
    others = sorted((seconds, name) for name, seconds in summary.rank_seconds.items() if name != "useful")
    parts = [f"{name} {seconds / held:.1%}" for seconds, name in reversed(others) if seconds / held >= 0.0005]
    return f"{summary.goodput:.1%} of {duration(held)} of rank time" + (f"; {', '.join(parts)}" if parts else "")


def printable(text: str, limit: int = 400) -> str:
    """Text of others without control characters, cut to `limit`: it may not steer a terminal or flood a page."""
    clean = "".join(char if char.isprintable() else " " for char in text)
    return clean if len(clean) <= limit else f"{clean[: limit - 1]}…"


def without_nan(tree: Any) -> Any:
    """A tree for json.dumps: a number that is not finite, which JSON cannot write, becomes None."""
    if isinstance(tree, Mapping):
        return {key: without_nan(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_nan(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _state(kinds: Sequence[str], latest: float | None, now: float) -> State:
    last = next((kind for kind in reversed(kinds) if kind in ("start", "stop", "end")), None)
    if last in ("stop", "end"):
        return "finished" if last == "end" else "stopped"
    return "running" if latest is not None and now - latest < RUNNING_WITHIN_S else "stopped"


def _job_record(tree: Any) -> JobRecord:
    record = JobRecord(**{key: tree[key] for key in JobRecord.__dataclass_fields__ if key in tree})
    if not isinstance(record.spec, Mapping):
        raise ValueError("spec is no mapping")
    return JobRecord(
        name=str(record.name),
        plan_digest=str(record.plan_digest),
        spec=dict(record.spec),
        total_steps=int(record.total_steps),
        total_samples=int(record.total_samples),
        train_rows=int(record.train_rows),
    )


def _reason(error: BaseException) -> str:
    return printable(" ".join(str(error).split()), 200)
