"""A study's tables: every trial as columns for other programs, and HTML tables of the report. Pure; whatever they hold is escaped."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from math import inf, isfinite

import pyarrow as pa

from undula.plan.rules import RuleName
from undula.report.data.cost import HOUR_S
from undula.report.text import dollars, duration, number, printable
from undula.study.findings import Findings, GroupFindings, Law, Prediction
from undula.study.fits import Bound
from undula.study.rates import AtBatch, RatePoint
from undula.study.spec import StudySpec
from undula.study.trials import TrialRecord, trial_row
from undula.study.verdicts import interval_text

TRIALS_SHOWN = 300
NONE = "–"
STATES = ("complete", "diverged", "stopped", "failed", "running", "waiting")
SCHEMA = pa.schema(
    [
        ("name", pa.string()), ("optimizer", pa.string()), ("rule", pa.string()), ("batch", pa.int64()), ("base_lr", pa.float64()),
        ("warmup_samples", pa.int64()), ("seed", pa.int64()), ("state", pa.string()), ("lr", pa.float64()), ("last_loss", pa.float64()),
        ("best_loss", pa.float64()), ("samples", pa.int64()), ("steps", pa.int64()), ("samples_to_target", pa.float64()),
        ("steps_to_target", pa.int64()), ("seconds", pa.float64()), ("worker_seconds", pa.float64()), ("dollars", pa.float64()),
        ("message", pa.string()),
    ]
)  # fmt: skip
"""Of trials.csv and trials.parquet: what `trial_row` says, and the cost."""


def trial_table(spec: StudySpec, records: Iterable[TrialRecord]) -> pa.Table:
    """Every trial, in the order of the records."""
    return pa.Table.from_pylist([_trial_row(spec, record) for record in records], schema=SCHEMA)


def _trial_row(spec: StudySpec, record: TrialRecord) -> dict[str, object]:
    cost = None if spec.worker_hour is None else record.worker_seconds / HOUR_S * spec.worker_hour
    return {**trial_row(record, spec.target), "dollars": cost}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: Iterable[int] = (0,), empty: str = "") -> str:
    """HTML of a table whose cells are text; columns other than `words` are numbers, at the right."""
    left = set(words)
    css = ["" if place in left else ' class="n"' for place in range(len(head))]
    top = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(css, head, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{escape(printable(text))}</td>' for kind, text in zip(css, row, strict=True))}</tr>"
        for row in rows
    )
    if not body:
        return f'<div class="card"><p class="soft">{escape(empty)}</p></div>'
    return (
        f'<div class="card scroll" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def space_table(spec: StudySpec) -> str:
    """The search space."""
    rates = spec.rates
    rows = [
        ("batches", ", ".join(f"{each:,}" for each in spec.batches), f"{len(spec.batches)}"),
        ("base learning rates", f"{number(min(rates), 3)} to {number(max(rates), 3)}", f"{len(rates)}"),
        ("rules", ", ".join(spec.rules), f"{len(spec.rules)}"),
        ("warmups, samples", ", ".join(f"{each:,}" for each in spec.warmup_axis), f"{len(spec.warmup_axis)}"),
        ("optimizers", ", ".join(spec.optimizers), f"{len(spec.optimizers)}"),
        ("seeds", ", ".join(map(str, spec.seeds)), f"{len(spec.seeds)}"),
        ("metric", spec.metric.replace("_", " "), NONE),
        ("target", NONE if spec.target is None else f"{spec.target:g}", NONE),
        ("samples of each training", f"{spec.samples:,}" if spec.samples else "as the job has", NONE),
        ("search", spec.search + (f", {spec.trials:,} trials" if spec.trials else ""), NONE),
        ("stopped early", "by ASHA" if spec.scheduler == "asha" else "none", NONE),
    ]
    return table(("", "values", "how many"), rows, words=(0, 1))


def states_table(findings: Findings) -> str:
    """Trials per batch by state."""
    counts: dict[int, Counter[str]] = {batch: Counter() for batch in sorted(findings.spec.batches)}
    for record in findings.records:
        counts.setdefault(record.trial.batch, Counter())[record.state] += 1
    shown = [state for state in STATES if state in STATES[:4] or any(found[state] for found in counts.values())]
    rows = [
        [f"{batch:,}", *(f"{found[state]:,}" for state in shown), f"{found.total():,}"]
        for batch, found in counts.items()
    ]
    sums = [sum(found[state] for found in counts.values()) for state in shown]
    rows.append(["all", *(f"{each:,}" for each in sums), f"{sum(sums):,}"])
    return table(("batch", *shown, "all"), rows)


def seeds_table(findings: Findings) -> str:
    """Mean and deviation of the lowest loss at each batch."""
    rows = []
    for found in findings.groups:
        for each in found.main.batches:
            point = each.lowest
            rows.append((found.group.title, f"{each.batch:,}", *_point_cells(point, each)))
    return table(
        ("trainings", "batch", "best rate tried", "seeds", "mean loss", "deviation", "best rate"),
        rows,
        empty="Nothing was trained.",
    )


def _point_cells(point: RatePoint | None, each: AtBatch) -> tuple[str, ...]:
    if point is None:
        return (NONE,) * 5
    best = NONE
    if each.optimum:
        best = bounded(each.optimum.rate, each.optimum.bound)
    deviation = NONE if point.deviation is None else number(point.deviation, 2)
    return number(point.rate), f"{len(point.losses)}", number(point.loss), deviation, best


def bounded(value: float | None, bound: Bound | None) -> str:
    """`0.02`, or `≥ 0.02`."""
    return NONE if value is None else " ".join(filter(None, (bound, number(value))))


def cost_table(findings: Findings) -> str:
    """Seconds and dollars by batch."""
    rows: list[tuple[str, ...]] = []
    hourly = findings.spec.worker_hour
    batches = sorted({record.trial.batch for record in findings.records})
    for label, mine in [
        *((f"{batch:,}", [record for record in findings.records if record.trial.batch == batch]) for batch in batches),
        ("all", list(findings.records)),
    ]:
        seconds, worker_s = sum(each.seconds for each in mine), sum(each.worker_seconds for each in mine)
        cost = NONE if hourly is None else dollars(worker_s / HOUR_S * hourly)
        mean = duration(seconds / len(mine)) if mine else NONE
        rows.append((label, f"{len(mine):,}", duration(seconds), mean, duration(worker_s), cost))
    return table(("batch", "trials", "wall-clock of all", "of a trial", "worker time", "cost"), rows)


def verdict_table(found: GroupFindings) -> str:
    """What each fit says of each rule."""
    laws = [(tuning, law) for tuning in found.tunings for law in tuning.laws if law.verdicts]
    if not laws:
        return ""
    rules = list(dict.fromkeys(each.rule for _, law in laws for each in law.verdicts))
    powers = {each.rule: each.exponent for _, law in laws for each in law.verdicts}
    head = "".join(
        f"<th>{escape('' if tuning is found.main else f'under {tuning.rules[0]}, ')}batches {law.batches}"
        f'<span class="sub">{law.fit.exponent:.2f} ({interval_text(law.fit.interval)})</span></th>'
        for tuning, law in laws
    )
    body = ""
    for rule in rules:
        cells = "".join(_judged(rule, law) for _, law in laws)
        body += f'<tr><td>{escape(rule)}</td><td class="n">{powers[rule]:g}</td>{cells}</tr>'
    return (
        '<div class="card scroll" tabindex="0"><table class="verdicts"><thead><tr><th>rule</th><th class="n">its power</th>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _judged(rule: RuleName, law: Law) -> str:
    """A cell; what is not rejected is no success of the rule where no other is rejected either."""
    judgement: str = next((each.judgement for each in law.verdicts if each.rule == rule), "not tested")
    if judgement == "not rejected" and not law.tells_apart:
        return '<td class="v-not-tested">not told apart</td>'
    return f'<td class="v-{judgement.replace(" ", "-")}">{judgement}</td>'


def predictions_table(findings: Findings) -> str:
    """What rules predict, what was tuned, and what following the rule cost in loss."""
    rows = [
        (
            found.group.title,
            each.rule,
            f"{each.batch:,}",
            bounded(each.rate, each.bound),
            bounded(each.tuned, each.tuned_bound),
            NONE if each.ratio is None else " ".join(filter(None, (each.ratio[0], f"{each.ratio[1]:.2f}"))),
            _loss_cell(each),
            bounded(each.tuned_loss, each.tuned_loss_bound),
            NONE if each.cost is None else " ".join(filter(None, (each.cost[0], f"{each.cost[1]:+.3g}"))),
        )
        for found in findings.groups
        for each in found.predictions
    ]
    return table(
        ("trainings", "rule", "batch", "predicted rate", "best rate", "ratio", "loss there", "lowest loss", "difference"),
        rows,
        words=(0, 1),
        empty="Rules scale from one batch to another, and the study has one.",
    )  # fmt: skip


def _loss_cell(each: Prediction) -> str:
    if each.at_rate.loss is not None:
        return bounded(each.at_rate.loss, each.loss_bound)
    return each.at_rate.outcome or (NONE if each.bound else "not trained")


def failures_table(findings: Findings) -> str:
    """Trials that failed, and why."""
    failed = [record for record in findings.records if record.state == "failed"]
    return (
        table(("trial", "message"), [(each.trial.name, each.message or NONE) for each in failed], (0, 1))
        if failed
        else ""
    )


def trials_table(findings: Findings) -> str:
    """All trials, as far as a page should hold them."""
    target = findings.spec.target
    rows = []
    for record in findings.records[:TRIALS_SHOWN]:
        trial = record.trial
        reached = inf if target is None else record.steps_to(target)
        rows.append(
            (
                trial.optimizer,
                trial.rule,
                f"{trial.batch:,}",
                number(trial.base_lr),
                number(record.lr),
                f"{trial.warmup:,}",
                f"{trial.seed}",
                record.state,
                number(record.last_loss) if isfinite(record.last_loss) else NONE,
                f"{reached:,.0f}" if isfinite(reached) else NONE,
                duration(record.seconds),
            )
        )
    head = (
        "optimizer",
        "rule",
        "batch",
        "base rate",
        "rate",
        "warmup",
        "seed",
        "state",
        "loss",
        "steps to target",
        "time",
    )
    return table(head, rows, words=(0, 1, 7), empty="There are no trials.")
