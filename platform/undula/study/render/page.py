"""A study's report: one self-contained HTML page with verdicts, figures and tables, each figure as SVG and PNG, every trial as CSV and
Parquet.

The page asks nothing of the network and runs no script. Text of others (names, messages) is escaped, and a Content-Security-Policy
lets no style through but the page's own.
"""

import base64
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from html import escape
from importlib.resources import files
from math import inf, isfinite
from string import Template

import pyarrow.csv as csv
import pyarrow.parquet as parquet
import yaml

from undula.plan.rules import changes_rate_alone
from undula.report.data.cost import HOUR_S
from undula.report.text import counted, dollars, duration, number, printable
from undula.storage import Store
from undula.study.findings import Findings, GroupFindings, find
from undula.study.rates import optimizer_words
from undula.study.render import report_tables as tables
from undula.study.render.drawing import dark_counterparts
from undula.study.render.figures import StudyFigure, group_figures, warmup_figures
from undula.study.spec import StudySpec
from undula.study.trials import TrialRecord
from undula.study.verdicts import critical_batch_text, interval_text, untested_sentences, verdict_sentences

FOLDER = "report"


def write_report(store: Store, spec: StudySpec, records: Sequence[TrialRecord]) -> str:
    """Write report/ into a study's directory: index.html, trials.csv, trials.parquet and figures/. Returns the page's path or URL.

    What cannot be told of the records is said on the page: a study that is half done, or of which nothing came, has one all the same.

    Args:
        store: the study's directory.
        spec: the study.
        records: of all its trials, those that wait among them.

    Raises:
        StorageError: the directory cannot be written.
    """
    findings = find(spec, records)
    groups = [list(group_figures(findings, found)) for found in findings.groups]
    warmups = list(warmup_figures(findings))
    there = store / FOLDER
    for figure in (each for part in (*groups, warmups) for each in part):
        for ending, data in _figure_files(figure):
            there.write(f"figures/{figure.name}.{ending}", data)
    trials = tables.trial_table(spec, records)
    for name, write in (("trials.csv", csv.write_csv), ("trials.parquet", parquet.write_table)):
        file = io.BytesIO()
        write(trials, file)
        there.write(name, file.getvalue())
    there.write("index.html", render(findings, groups, warmups).encode())
    return f"{there.url}/index.html"


def publish(store: Store, spec: StudySpec, records: Sequence[TrialRecord]) -> list[str]:
    """Write the report; what to print of it: the verdict in words, and where it is."""
    page = write_report(store, spec, records)
    return [*verdict_lines(spec, records), "", f"report: {page}"]


def verdict_lines(spec: StudySpec, records: Sequence[TrialRecord]) -> list[str]:
    """The verdict in words, for a terminal; the same that the page says."""
    findings = find(spec, records)
    told = []
    for found in findings.groups:
        told += [f"{found.group.title}:", *(f"  {text}" for text in verdict_sentences(found))]
    told += [f"note: {text}" for text in findings.warnings]
    return [*told, "not tested:", *(f"  {text}" for text in untested_sentences(findings))]


def render(
    findings: Findings,
    groups: Sequence[Sequence[StudyFigure]],
    warmups: Sequence[StudyFigure],
) -> str:
    """The page as HTML.

    Args:
        findings: what it says.
        groups: figures of each group of the findings.
        warmups: figures of the warmup ablation.
    """
    spec = findings.spec
    template = (files("undula.study.render") / "page.html").read_text(encoding="utf-8")
    colors = _dark_colors(spec.batches)
    style = template.split("<style>")[1].split("</style>")[0].replace("$figure_colors", colors)
    sections = (
        f"<h2>{escape(found.group.title)}</h2>{_figures(figures)}"
        for found, figures in zip(findings.groups, groups, strict=True)
    )
    return Template(template).substitute(
        style_hash=f"sha256-{base64.b64encode(sha256(style.encode()).digest()).decode()}",
        figure_colors=colors,
        name=escape(printable(spec.name)),
        state="unfinished" if findings.unfinished else "finished",
        under=_under(findings),
        tiles=_tiles(findings),
        verdicts="".join(_verdict(found) for found in findings.groups) + _warnings(findings),
        not_tested=_items(untested_sentences(findings)),
        groups="".join(sections),
        warmups="".join(map(_figure, warmups)),
        predictions=tables.predictions_table(findings),
        space=tables.space_table(spec),
        states=tables.states_table(findings),
        failures=tables.failures_table(findings),
        seeds=tables.seeds_table(findings),
        cost=tables.cost_table(findings),
        trials=tables.trials_table(findings),
        spec=escape(yaml.safe_dump(_plain(asdict(spec)), sort_keys=False, allow_unicode=True)),
        foot=_foot(findings),
    )


def _figure_files(figure: StudyFigure) -> Iterator[tuple[str, bytes]]:
    if figure.drawn:
        yield "svg", f'<?xml version="1.0" encoding="utf-8"?>\n{figure.drawn.svg}\n'.encode()
        yield "png", figure.drawn.png


def _figures(figures: Iterable[StudyFigure]) -> str:
    return f'<div class="figures">{"".join(map(_figure, figures))}</div>'


def _figure(figure: StudyFigure) -> str:
    name = escape(figure.name)
    if figure.drawn:
        links = f'<p class="files"><a href="figures/{name}.svg">SVG</a> <a href="figures/{name}.png">PNG</a></p>'
        body = figure.drawn.svg + links
    else:
        body = f'<p class="none">{escape(_sentence(figure.problem))}</p>'
    return (
        f'<figure class="card fig" id="{name}"><figcaption><h3>{escape(figure.title)}</h3><p>{escape(figure.note)}</p></figcaption>'
        f"{body}</figure>"
    )


def _sentence(text: str) -> str:
    clean = printable(text)
    return f"{clean[:1].upper()}{clean[1:]}."


def _dark_colors(batches: Sequence[int]) -> str:
    """CSS that exchanges the figures' colours where the page is dark.

    The selectors name no ancestor: what a figure uses twice is matched in a tree of its own, where there is none.
    """
    rules = "".join(
        f'  [{what}="{light}"] {{ {what}: {dark}; }}\n'
        for light, dark in dark_counterparts(batches).items()
        for what in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme: dark) {{\n{rules}}}"


def _verdict(found: GroupFindings) -> str:
    told = _items(verdict_sentences(found))
    return f'<div class="card"><h3>{escape(found.group.title)}</h3><ul class="say">{told}</ul></div>{tables.verdict_table(found)}'


def _warnings(findings: Findings) -> str:
    return f'<div class="card"><ul class="say warn">{_items(findings.warnings)}</ul></div>' if findings.warnings else ""


def _items(texts: Iterable[str]) -> str:
    return "".join(f"<li>{escape(printable(text))}</li>" for text in texts)


def _under(findings: Findings) -> str:
    spec = findings.spec
    parts = (
        printable(spec.job),
        " and ".join(map(optimizer_words, spec.optimizers)),
        f"batches {min(spec.batches):,}–{max(spec.batches):,}"
        if len(spec.batches) > 1
        else f"batch {spec.batches[0]:,}",
        f"target {spec.target:g}" if spec.target is not None else "no target",
        f"{counted(findings.unfinished, 'trial')} not finished: figures are of those that are"
        if findings.unfinished
        else "",
    )
    return " · ".join(escape(part) for part in parts if part)


def _tiles(findings: Findings) -> str:
    spec, records, hourly = findings.spec, findings.records, findings.spec.worker_hour
    states: Counter[str] = Counter(record.state for record in records)
    told = ", ".join(f"{states[state]:,} {state}" for state in tables.STATES if states[state]) or "none"
    ended = sum(record.has_ended for record in records)
    lowest, where = _lowest(findings)
    worker_s, seconds = sum(each.worker_seconds for each in records), sum(each.seconds for each in records)
    first = findings.groups[0]
    law = first.main.laws[0] if first.main.laws else None
    of = first.group.title if len(findings.groups) > 1 else ""
    tiles = [
        ("trials", f"{ended:,}", f"of {len(records):,}: {told}"),
        (f"lowest {spec.metric.replace('_', ' ')}", number(lowest) if isfinite(lowest) else tables.NONE, where),
        (
            "best rate goes as",
            f"batch^{law.fit.exponent:.2f}" if law else tables.NONE,
            " · ".join(
                filter(
                    None,
                    (
                        of,
                        f"{interval_text(law.fit.interval)}, batches {law.batches}" if law else "no fit",
                        "" if law is None or law.tells_apart else "does not tell rules apart",
                    ),
                )
            ),
        ),
        (
            "critical batch",
            critical_batch_text(first.pareto) if first.pareto else tables.NONE,
            " · ".join(filter(None, (of, "samples" if first.pareto else "no fit"))),
        ),
        ("trainings, one after another", duration(seconds), "on the wall clock"),
        ("worker time", duration(worker_s), "seconds times workers"),
        (
            "cost",
            dollars(worker_s / HOUR_S * hourly) if hourly is not None else tables.NONE,
            f"at {dollars(hourly)} an hour of a worker" if hourly is not None else "no price was given",
        ),
        (
            "seeds",
            f"{len(spec.seeds)}",
            "of each training" if len(spec.seeds) > 1 else "chance between seeds is not seen",
        ),
    ]
    return "".join(
        f'<div class="tile"><dt>{escape(dt)}</dt><dd>{escape(dd)}</dd><dd class="note">{escape(note)}</dd></div>'
        for dt, dd, note in tiles
    )


def _lowest(findings: Findings) -> tuple[float, str]:
    """The lowest mean over seeds, and what it was trained with; infinite where nothing is complete."""
    spec = findings.spec
    points = [
        (found.group, tuning.rules, each.batch, each.lowest)
        for found in findings.groups
        for tuning in found.tunings
        for each in tuning.batches
        if each.lowest
    ]
    if not points:
        return inf, "none is complete"
    group, rules, batch, point = min(points, key=lambda each: each[3].loss)
    parts = [f"batch {batch:,}", f"rate {number(point.rate, 3)}"]
    parts += [optimizer_words(group.optimizer)] if len(spec.optimizers) > 1 else []
    parts += [rules[0]] if batch != spec.batches[0] and not changes_rate_alone(rules[0], group.warmup) else []
    parts += [f"warmup {group.warmup:,}"] if len(spec.warmup_axis) > 1 else []
    parts += [f"mean of {counted(len(point.losses), 'seed')}"] if len(spec.seeds) > 1 else []
    return point.loss, ", ".join(parts)


def _foot(findings: Findings) -> str:
    more = len(findings.records) - tables.TRIALS_SHOWN
    left_out = f"{more:,} more trials are in these files. " if more > 0 else ""
    return (
        f'{left_out}Every trial: <a href="trials.csv">trials.csv</a>, <a href="trials.parquet">trials.parquet</a>. '
        "Intervals are of 95 %: of an exponent, Student's over the batches joined with a bootstrap over seeds; of the critical batch, a "
        "bootstrap over residuals."
    )


def _plain(tree: object) -> object:
    """Lists for tuples, which safe YAML has none of."""
    if isinstance(tree, dict):
        return {str(key): _plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_plain(value) for value in tree]
    return tree if isinstance(tree, str | int | float | bool | None) else str(tree)
