"""Page of a plan: one HTML file with its table, the memory and the time of configurations by part, and curves over numbers of workers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from undula.driver.plan_host import host_sentences
from undula.driver.plan_job import Planned
from undula.driver.plan_model import count_text
from undula.driver.plan_reasons import name_of, reasons, setting_text
from undula.driver.plan_table import (
    COLUMNS,
    by_gpu,
    dollars_text,
    gib_text,
    hours_text,
    rate_text,
    rows_of,
    seconds_text,
    sentences,
    text_of_none,
    text_of_small,
)
from undula.plan.candidates import (
    LAUNCH_S,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    OUTAGE_S,
    Candidate,
    Target,
    cheapest,
    fastest,
    prices_of,
)
from undula.plan.gpus import CONTEXT_BYTES, GIB, MARGIN
from undula.report.render.axes import Axis, log_axis
from undula.report.render.chart import Chart, Key, Layer, Line, Points
from undula.report.render.comparison import COLORS
from undula.report.render.html import SHARED_PACKAGE, Tile, colors_css, render_page
from undula.report.text import DASH, printable
from undula.storage import write_file
from undula.train.dry_run.counting import Setting

MEMORY = {
    "parameters": ("parameters", ("#1f5fae", "#6ea8ec")),
    "gathered": ("gathered parameters", ("#3a8fd0", "#9cc8f2")),
    "optimizer": ("optimizer", ("#6a45a8", "#b797ec")),
    "gradients": ("gradients", ("#b8500f", "#f2a35e")),
    "activations": ("activations", ("#0c756c", "#4fc3b5")),
    "temporary": ("temporary", ("#cf8a1d", "#e2c15a")),
    "rest": ("buffers, batch and others", ("#c22a5a", "#ff8aa8")),
    "margin": ("blocks of the allocator", ("#a9b2bd", "#5f6b79")),
    "context": ("context of CUDA", ("#566170", "#98a4b2")),
}
"""Parts of the memory with their labels and their colours on a light and on a dark page."""
SECONDS = {
    "compute": ("computation", ("#2b6cb8", "#5a97dc")),
    "communication": ("exchange between workers", ("#8a63c4", "#a582dc")),
    "update": ("update", ("#0c756c", "#4fc3b5")),
    "data": ("waiting for data", ("#cf8a1d", "#dda449")),
}
"""Parts of a step's duration with their labels and their colours."""
LEAST_SPAN = 4
"""Least ratio of the ends of an axis, so that small differences look small."""
OTHERS = ("buffers", "others", "batch")
"""Parts of the memory that are small, and shown as one."""


@dataclass(frozen=True)
class Conditions:
    """What a plan assumes of the machines."""

    latency_ms: float
    gbit: float
    interruptions: float
    """Number of times in an hour that a spot worker is taken."""


@dataclass(frozen=True)
class Segment:
    """Segment of a bar."""

    css: str
    label: str
    amount: str
    start: str
    """Position in percent of the width."""
    size: str
    """Size in percent of the width."""


@dataclass(frozen=True)
class StackedBar:
    """Bar of a configuration."""

    title: str
    setting: str
    amount: str
    segments: Sequence[Segment]
    limit: str | None = None
    """Position of a line at a limit in percent; None for none."""


def write_page(
    file: Path, planned: Planned, notes: Sequence[str], target: Target | None, conditions: Conditions
) -> None:
    """Write the page to a file, with the arguments of `render_plan`. A model by its size gets a name of its own."""
    name = f"GPT of {count_text(planned.counted.state.parameters)} parameters" if notes else planned.counted.spec.name
    write_file(str(file), render_plan(planned, name, notes, target, conditions).encode())


def render_plan(
    planned: Planned, name: str, notes: Sequence[str], target: Target | None, conditions: Conditions
) -> str:
    """Return the page as HTML.

    Args:
        planned: The plan.
        name: Name of the job.
        notes: Sentences about what was taken for the size of a model; none for a job.
        target: What the user wants; None for the cheapest configuration.
        conditions: What the plan assumes.
    """
    found, choice = planned.candidates, planned.choice(target)
    groups = {gpu: bars for gpu, group in by_gpu(found).items() if (bars := _bars_of(planned, group))}
    context = {
        "name": printable(name),
        "state": "",
        "facts": ["plan", *(note.removesuffix(".") for note in notes or [_job_text(planned)])],
        "assumptions": _assumptions(conditions),
        "tiles": _tiles(planned, choice),
        "reasons": [*reasons(found, target, choice)] or [("", text_of_none(planned.higher))],
        "missed": target is not None and choice is None,
        "sentences": [*filter(None, [text_of_small(planned)]), *sentences(planned)],
        "head": ["", *COLUMNS[1:6], "tokens/s" if planned.counted.tokens else "samples/s", *COLUMNS[7:]],
        "rows": sorted(
            rows_of(planned, choice), key=lambda row: not set("CF*") & set(row[0])
        ),  # the best ones come first
        "memory": [(gpu, _memory_bars(bars)) for gpu, bars in groups.items()],
        "hosts": [*host_sentences(planned, choice)],
        "memory_keys": [(f"m-{part}", label) for part, (label, _) in MEMORY.items()],
        "seconds": [(gpu, _second_bars(bars)) for gpu, bars in groups.items()],
        "seconds_keys": [(f"t-{part}", label) for part, (label, _) in SECONDS.items()],
        "charts": [*_charts(planned)],
    }
    colors = {f"m-{part}": pair for part, (_, pair) in MEMORY.items()}
    colors |= {f"t-{part}": pair for part, (_, pair) in SECONDS.items()}
    colors |= {f"r-{place}": pair for place, pair in enumerate(COLORS)}
    return render_page("configurations.html", context, package=SHARED_PACKAGE, more_style=colors_css(colors))


def _job_text(planned: Planned) -> str:
    """Return the job in one line."""
    plan, state = planned.counted.spec.plan, planned.counted.state
    return (
        f"{count_text(state.parameters)} parameters, {plan.global_batch:,} samples per step on {plan.virtual_workers} virtual workers, "
        f"{planned.counted.steps:,} steps"
    )


def _assumptions(conditions: Conditions) -> str:
    return (
        f"Assumed, and not measured: {MATMUL_EFFICIENCY:.0%} of the peak of the data sheet in matrix products, {MEMORY_EFFICIENCY:.0%} of "
        f"the bandwidth elsewhere, {LAUNCH_S * 1e6:.0f} µs of the host for an operation, {CONTEXT_BYTES / GIB:.1f} GiB for CUDA and NCCL, "
        f"{MARGIN:.0%} for blocks of the allocator; {conditions.gbit:g} Gbit/s and {conditions.latency_ms:g} ms between two workers; a "
        f"spot worker is taken {conditions.interruptions:g} times an hour, and each change costs {OUTAGE_S:.0f} s."
    )


def _tiles(planned: Planned, choice: Candidate[Setting] | None) -> list[Tile]:
    found, state = planned.candidates, planned.counted.state
    size = f"{gib_text(state.parameter_bytes + state.optimizer_bytes)} with the optimizer"
    best = {"cheapest": cheapest(found), "fastest": fastest(found), "choice": choice}
    return [Tile("parameters", count_text(state.parameters), size), *(_tile(*each) for each in _by_candidate(best))]


def _tile(roles: Sequence[str], candidate: Candidate[Setting] | None) -> Tile:
    """Return the tile of a configuration with its price, or its time if that is what it stands for."""
    label = ", ".join(roles)
    if candidate is None:
        return Tile(label, DASH, "none meets the target" if label == "choice" else "none fits")
    price, time = min(prices_of(candidate), default=None), hours_text(candidate.hours)
    if price is None or label == "fastest":
        return Tile(label, time, name_of(candidate))
    return Tile(label, dollars_text(price), f"{time}, {name_of(candidate)}")


def _by_candidate(
    roles: Mapping[str, Candidate[Setting] | None],
) -> list[tuple[list[str], Candidate[Setting] | None]]:
    """Return the configurations that have roles, each with all of its roles."""
    named: dict[int, tuple[list[str], Candidate[Setting] | None]] = {}
    for role, each in roles.items():
        named.setdefault(id(each), ([], each))[0].append(role)
    return [*named.values()]


def _bars_of(planned: Planned, group: Sequence[Candidate[Setting]]) -> list[tuple[str, Candidate[Setting]]]:
    """Return the configurations of a GPU that have bars, each with what it is."""
    # A micro-batch of the job's own size may not have been counted, if the script needs values.
    own = min(
        (each for each in group if each.setting == planned.own),
        key=lambda each: (not each.fits, each.hours),
        default=None,
    )
    fitting = [each for each in group if each.fits]
    nearest = min(fitting, key=lambda each: each.hours * each.workers, default=None)
    roles = {
        "own setting": own,
        "nearest that fits": None if own and own.fits else nearest,
        "cheapest": cheapest(group),
        "fastest": fastest(group),
    }
    return [(", ".join(names), each) for names, each in _by_candidate(roles) if each is not None]


def _memory_bars(bars: Sequence[tuple[str, Candidate[Setting]]]) -> list[StackedBar]:
    longest = max(max(each.needed_bytes, each.room_bytes) for _, each in bars)
    made = []
    for role, each in bars:
        parts = {part: getattr(each.memory, part) for part in MEMORY if part not in ("rest", "margin")}
        parts["rest"] = sum(getattr(each.memory, part) for part in OTHERS)
        parts["margin"] = each.needed_bytes - each.memory.total
        amount = f"{each.needed_bytes / GIB:.1f} of {gib_text(each.room_bytes)}{'' if each.fits else ', does not fit'}"
        limit = _percent(each.room_bytes / longest)
        made.append(_bar(role, each, amount, {part: parts[part] for part in MEMORY}, longest, "m-", gib_text, limit))
    return made


def _second_bars(bars: Sequence[tuple[str, Candidate[Setting]]]) -> list[StackedBar]:
    longest = max(each.step.total for _, each in bars)
    return [
        _bar(
            role,
            each,
            seconds_text(each.step.total),
            {part: getattr(each.step, part) for part in SECONDS},
            longest,
            "t-",
            seconds_text,
        )
        for role, each in bars
    ]


def _bar(
    role: str,
    candidate: Candidate[Setting],
    amount: str,
    parts: Mapping[str, float],
    longest: float,
    css: str,
    text: Callable[[float], str],
    limit: str | None = None,
) -> StackedBar:
    labels = {part: label for part, (label, _) in {**MEMORY, **SECONDS}.items()}
    segments, start = [], 0.0
    for part, size in parts.items():
        place = _percent(start / longest), _percent(size / longest)
        segments.append(Segment(f"{css}{part}", labels[part], text(size), *place))
        start += size
    workers = f"{candidate.workers} worker{'s' if candidate.workers > 1 else ''}"
    return StackedBar(role, f"{workers}, {setting_text(candidate.setting)}", amount, segments, limit)


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"


def _charts(planned: Planned) -> Iterator[Chart]:
    """Yield the charts of the fastest and of the cheapest configurations over the number of workers, with a line for each GPU."""
    counts = sorted({each.workers for each in planned.candidates})
    unit = "tokens" if planned.counted.tokens else "samples"
    speeds = _curves(planned, counts, lambda group: _speed(fastest(group)))
    costs = _curves(planned, counts, lambda group: _cost(cheapest(group)))
    pad = 1.25 if len(counts) == 1 else (counts[-1] / counts[0]) ** 0.05
    x = Axis(
        counts[0] / pad, counts[-1] * pad, tuple((float(count), str(count)) for count in counts), "workers", is_log=True
    )
    for key, title, note, curves in (
        (
            "speed",
            "Speed",
            f"{unit} per second of the fastest configuration that fits; both axes are logarithmic",
            speeds,
        ),
        (
            "cost",
            "Cost of the run",
            "US dollars of the cheapest configuration that fits; both axes are logarithmic",
            costs,
        ),
    ):
        values = [value for ys in curves.values() for value in ys if np.isfinite(value)]
        if not values:
            continue
        layers: list[Layer] = []
        keys = []
        for place, (gpu, ys) in enumerate(curves.items()):
            css = f"r-{place % len(COLORS)}"
            xs, values_of_gpu = np.array(counts, dtype=float), np.array(ys)
            is_known = np.isfinite(values_of_gpu)
            layers += [Line(xs, values_of_gpu, css), Points(xs[is_known], values_of_gpu[is_known], css)]
            keys.append(Key(gpu, css, "circle", is_line=True))
        text = (
            rate_text if key == "speed" else (lambda dollars: f"${dollars:,.0f}" if dollars >= 10 else f"${dollars:g}")
        )
        y = log_axis(min(*values, max(values) / LEAST_SPAN), max(values), pad=0.08)
        labelled = Axis(y.low, y.high, tuple((tick, text(tick)) for tick, _ in y.ticks), is_log=True)
        yield Chart(x, labelled, layers, keys, key=key, title=title, note=note)


def _curves(
    planned: Planned, counts: Sequence[int], value_of: Callable[[Sequence[Candidate[Setting]]], float]
) -> dict[str, list[float]]:
    """Return a value for each GPU and number of workers; NaN where nothing fits."""
    return {
        gpu: [value_of([each for each in group if each.workers == count]) for count in counts]
        for gpu, group in by_gpu(planned.candidates).items()
    }


def _speed(best: Candidate[Setting] | None) -> float:
    return float("nan") if best is None else best.tokens_per_s or best.samples_per_s


def _cost(best: Candidate[Setting] | None) -> float:
    return min([] if best is None else prices_of(best), default=float("nan"))
