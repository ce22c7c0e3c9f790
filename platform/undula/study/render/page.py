"""Report of a study: one self-contained HTML page with verdicts, figures and tables. The page makes no network requests and runs no script.

Beside the page are the figures as SVG and PNG, and all trials as CSV and Parquet.
"""

import io
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf, isfinite
from pathlib import Path

import pyarrow.csv as csv
import pyarrow.parquet as parquet
import yaml
from resvg_py import svg_to_bytes

from undula.config.secrets import hide_secrets
from undula.plan.rules import RULES
from undula.report.data.cost import HOUR_S
from undula.report.render.html import Tile, colors_css, render_chart, render_page
from undula.report.text import DASH, counted, dollars, duration, number, printable
from undula.storage import Store
from undula.study.findings import Findings, find
from undula.study.rates import optimizer_words, over_common_seeds
from undula.study.render import report_tables as tables
from undula.study.render.figures import StudyFigure, group_figures, warmup_figures
from undula.study.render.look import colors
from undula.study.spec import StudySpec
from undula.study.trials import TrialRecord
from undula.study.verdicts import critical_batch_text, interval_text, untested_sentences, verdict_sentences

FOLDER = "report"
FONT = Path(__file__).parent / "templates" / "DejaVuSans.ttf"
"""Font of the PNG files: the letters of DejaVu Sans that figures use, because containers often have no fonts."""
PNG_ZOOM = 2.2
"""Number of pixels of a PNG file for each pixel of the SVG file."""


def write_report(store: Store, spec: StudySpec, records: Sequence[TrialRecord]) -> str:
    """Write the folder report/ of a study: index.html, trials.csv, trials.parquet and figures/.

    A report can be written at any time, even before a trial has finished, because the page lists what is missing.

    Args:
        store: Directory of the study.
        spec: The study.
        records: All trials, including waiting ones.

    Returns:
        The path or URL of the page.

    Raises:
        StorageError: The directory cannot be written.
    """
    findings = find(spec, records)
    groups = [list(group_figures(findings, results)) for results in findings.groups]
    warmups = list(warmup_figures(findings))
    folder = store / FOLDER
    palette = _colors(findings)
    light = "".join(f".{css} {{ color: {color}; }}\n" for css, (color, _) in palette.items())
    for figure in itertools.chain(*groups, warmups):
        if figure.chart:
            svg = render_chart(figure.chart, light)
            folder.write(f"figures/{figure.name}.svg", svg.encode())
            folder.write(f"figures/{figure.name}.png", png(svg))
    trials = tables.trial_table(spec, records)
    for name, write in (("trials.csv", csv.write_csv), ("trials.parquet", parquet.write_table)):
        file = io.BytesIO()
        write(trials, file)
        folder.write(name, file.getvalue())
    folder.write("index.html", render(findings, groups, warmups).encode())
    return f"{folder.url}/index.html"


def publish(store: Store, spec: StudySpec, records: Sequence[TrialRecord]) -> list[str]:
    """Write the report, and return its verdicts and path as lines for the terminal."""
    page = write_report(store, spec, records)
    return [*verdict_lines(spec, records), "", f"report: {page}"]


def verdict_lines(spec: StudySpec, records: Sequence[TrialRecord]) -> list[str]:
    """Return the verdicts of the page as lines for a terminal."""
    findings = find(spec, records)
    lines = []
    for results in findings.groups:
        lines += [f"{results.group.title}:", *(f"  {text}" for text in verdict_sentences(results))]
    lines += [f"note: {text}" for text in findings.warnings]
    return [*lines, "not tested:", *(f"  {text}" for text in untested_sentences(findings))]


def render(findings: Findings, groups: Sequence[Sequence[StudyFigure]], warmups: Sequence[StudyFigure]) -> str:
    """Return the page as HTML.

    Args:
        findings: Findings of the study.
        groups: Figures of each group of the findings.
        warmups: Figures of the warmup ablation.
    """
    spec = findings.spec
    context = {
        "name": printable(spec.name),
        "state": "unfinished" if findings.unfinished else "finished",
        "facts": _facts(findings),
        "tiles": [*_result_tiles(findings), *_effort_tiles(findings)],
        "verdicts": [
            (results.group.title, verdict_sentences(results), tables.verdict_table(results))
            for results in findings.groups
        ],
        "warnings": findings.warnings,
        "untested": untested_sentences(findings),
        "groups": [(results.group.title, figures) for results, figures in zip(findings.groups, groups, strict=True)],
        "warmups": warmups,
        "predictions": tables.predictions_table(findings),
        "space": tables.space_table(spec),
        "states": tables.states_table(findings),
        "failures": tables.failures_table(findings),
        "seeds": tables.seeds_table(findings),
        "cost": tables.cost_table(findings),
        "trials": tables.trials_table(findings),
        "trials_left_out": max(len(findings.records) - tables.TRIALS_SHOWN, 0),
        # Safe YAML cannot write tuples, which JSON has as lists.
        "spec": yaml.safe_dump(json.loads(json.dumps(hide_secrets(asdict(spec)))), sort_keys=False, allow_unicode=True),
    }
    style = colors_css(_colors(findings))
    return render_page("study.html", context, package="undula.study.render", more_style=style)


def _colors(findings: Findings) -> Mapping[str, tuple[str, str]]:
    spec = findings.spec
    batches = {*spec.batches, *(record.trial.batch for record in findings.records)}
    return colors(sorted(batches), len(spec.warmup_axis))


def png(svg: str) -> bytes:
    """Return a figure as PNG, with the letters of the shipped font only."""
    image: bytes = svg_to_bytes(svg, zoom=PNG_ZOOM, font_files=[str(FONT)], skip_system_fonts=True)
    return image


def _facts(findings: Findings) -> list[str]:
    """Return the facts in the line below the title."""
    spec = findings.spec
    low, high, left = min(spec.batches), max(spec.batches), findings.unfinished
    facts = (
        printable(spec.job),
        " and ".join(map(optimizer_words, spec.optimizers)),
        f"batches {low:,}–{high:,}" if len(spec.batches) > 1 else f"batch {low:,}",
        f"target {spec.target:g}" if spec.target is not None else "no target",
        f"{counted(left, 'trial')} not finished; figures cover the others" if left else "",
    )
    return [fact for fact in facts if fact]


def _result_tiles(findings: Findings) -> list[Tile]:
    spec, records = findings.spec, findings.records
    counts = Counter(record.state for record in records)
    states = ", ".join(f"{counts[state]:,} {state}" for state in tables.STATES if counts[state]) or "none"
    ended = sum(record.has_ended for record in records)
    lowest, where = _lowest(findings)
    first = findings.groups[0]
    title = first.group.title if len(findings.groups) > 1 else ""
    law = first.main.laws[0] if first.main.laws else None
    fit = f"{interval_text(law.fit.interval)}, batches {law.batches}" if law else "no fit"
    doubt = "" if law is None or law.tells_apart else "does not distinguish rules"
    return [
        Tile("trials", f"{ended:,}", f"of {len(records):,}: {states}"),
        Tile(f"lowest {spec.metric.replace('_', ' ')}", number(lowest) if isfinite(lowest) else DASH, where),
        Tile("best rate scales as", f"batch^{law.fit.exponent:.2f}" if law else DASH, _joined(title, fit, doubt)),
        Tile(
            "critical batch",
            critical_batch_text(first.pareto) if first.pareto else DASH,
            _joined(title, "samples" if first.pareto else "no fit"),
        ),
    ]


def _effort_tiles(findings: Findings) -> list[Tile]:
    spec, records, hourly = findings.spec, findings.records, findings.spec.worker_hour
    worker_s, seconds = tables.worker_seconds(spec, records), sum(record.seconds for record in records)
    shared = f"wall time divided by the {spec.packed} trials that share a worker" if spec.share < 1 else ""
    cost = dollars(worker_s / HOUR_S * hourly) if hourly is not None else DASH
    price = f"at {dollars(hourly)} per worker and hour" if hourly is not None else "no price was given"
    seeds = "per trial" if len(spec.seeds) > 1 else "chance between seeds is not visible"
    return [
        Tile("wall time of all trials", duration(seconds), "sum over trials"),
        Tile("worker time", duration(worker_s), shared or "wall time multiplied by workers"),
        Tile("cost", cost, price),
        Tile("seeds", f"{len(spec.seeds)}", seeds),
    ]


def _joined(*parts: str) -> str:
    return " · ".join(filter(None, parts))


def _lowest(findings: Findings) -> tuple[float, str]:
    """Return the lowest mean loss over common seeds and a description of its trial, or infinity if no trial is complete."""
    spec = findings.spec
    where = [
        (results.group, tuning.rules, tuned)
        for results in findings.groups
        for tuning in results.tunings
        for tuned in tuning.batches
    ]
    compared = over_common_seeds([tuned for *_, tuned in where])
    points = [
        (group, rules, tuned.batch, tuned.lowest)
        for (group, rules, _), tuned in zip(where, compared, strict=True)
        if tuned.lowest
    ]
    if not points:
        return inf, "no trial is complete"
    group, rules, batch, point = min(points, key=lambda found: found[3].loss)
    parts = [f"batch {batch:,}", f"rate {number(point.rate, 3)}"]
    parts += [optimizer_words(group.optimizer)] if len(spec.optimizers) > 1 else []
    parts += [rules[0]] if batch != spec.batches[0] and not RULES[rules[0]].changes_rate_alone(group.warmup) else []
    parts += [f"warmup {group.warmup:,}"] if len(spec.warmup_axis) > 1 else []
    parts += [f"mean of {counted(len(point.losses), 'seed')}"] if len(spec.seeds) > 1 else []
    return point.loss, ", ".join(parts)
