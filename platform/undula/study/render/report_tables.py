"""Tables of a study's report: all trials for other programs, and the tables of the page. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

import pyarrow as pa

from undula.plan.rules import RuleName
from undula.report.data.cost import HOUR_S
from undula.report.text import DASH, dollars, duration, number, printable
from undula.study.findings import Findings, GroupFindings, Law, Prediction
from undula.study.fits import Bound
from undula.study.rates import AtBatch, RatePoint
from undula.study.spec import StudySpec
from undula.study.trials import State, TrialRecord, trial_row
from undula.study.verdicts import interval_text

SCHEDULERS = {"asha": "ASHA", "none": "none"}
TRIALS_SHOWN = 300
"""Maximum number of trials on the page."""
STATES: tuple[State, ...] = ("complete", "diverged", "stopped", "failed", "running", "waiting")
SCHEMA = pa.schema(
    [
        ("name", pa.string()), ("optimizer", pa.string()), ("rule", pa.string()), ("batch", pa.int64()), ("base_lr", pa.float64()),
        ("warmup_samples", pa.int64()), ("seed", pa.int64()), ("state", pa.string()), ("lr", pa.float64()), ("last_loss", pa.float64()),
        ("best_loss", pa.float64()), ("samples", pa.int64()), ("steps", pa.int64()), ("samples_to_target", pa.float64()),
        ("steps_to_target", pa.int64()), ("seconds", pa.float64()), ("worker_seconds", pa.float64()), ("dollars", pa.float64()),
        ("message", pa.string()),
    ]
)  # fmt: skip
"""Schema of trials.csv and trials.parquet: the columns of `trial_row`, and the cost."""


@dataclass(frozen=True)
class Cell:
    """Cell of a table."""

    text: str
    css: str = ""
    note: str = ""
    """Second line of a heading."""


@dataclass(frozen=True)
class PageTable:
    """Table of the page."""

    head: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    empty: str = ""
    """Sentence that replaces a table without rows."""


def trial_table(spec: StudySpec, records: Iterable[TrialRecord]) -> pa.Table:
    """Return the table of all trials, in the order of the records."""
    return pa.Table.from_pylist([_trial_row(spec, record) for record in records], schema=SCHEMA)


def space_table(spec: StudySpec) -> PageTable:
    """Return the table of the search space."""
    rates = spec.rates
    rows = [
        ("batches", ", ".join(f"{batch:,}" for batch in spec.batches), f"{len(spec.batches)}"),
        ("base learning rates", f"{number(min(rates), 3)} to {number(max(rates), 3)}", f"{len(rates)}"),
        ("rules", ", ".join(spec.rules), f"{len(spec.rules)}"),
        ("warmups in samples", ", ".join(f"{warmup:,}" for warmup in spec.warmup_axis), f"{len(spec.warmup_axis)}"),
        ("optimizers", ", ".join(spec.optimizers), f"{len(spec.optimizers)}"),
        ("seeds", ", ".join(map(str, spec.seeds)), f"{len(spec.seeds)}"),
        ("metric", spec.metric.replace("_", " "), DASH),
        ("target", DASH if spec.target is None else f"{spec.target:g}", DASH),
        ("samples per trial", f"{spec.samples:,}" if spec.samples else "as in the job", DASH),
        ("search", spec.search + (f", {spec.trials:,} trials" if spec.trials else ""), DASH),
        ("early stopping", SCHEDULERS[spec.scheduler], DASH),
    ]
    return _table(", values, count", rows, text_columns=(0, 1))


def states_table(findings: Findings) -> PageTable:
    """Return the table of the number of trials by batch and state."""
    counts: dict[int, Counter[State]] = {batch: Counter() for batch in sorted(findings.spec.batches)}
    for record in findings.records:
        counts.setdefault(record.trial.batch, Counter())[record.state] += 1
    shown = [state for state in STATES if state in STATES[:4] or any(count[state] for count in counts.values())]
    rows = [
        [f"{batch:,}", *(f"{count[state]:,}" for state in shown), f"{count.total():,}"]
        for batch, count in counts.items()
    ]
    sums = [sum(count[state] for count in counts.values()) for state in shown]
    rows.append(["all", *(f"{total:,}" for total in sums), f"{sum(sums):,}"])
    return _table(", ".join(["batch", *shown, "all"]), rows)


def failures_table(findings: Findings) -> PageTable | None:
    """Return the table of failed trials with the reasons, or None if there are none."""
    failed = [record for record in findings.records if record.state == "failed"]
    rows = [(failure.trial.name, failure.message or DASH) for failure in failed]
    return _table("trial, message", rows, text_columns=(0, 1)) if failed else None


def seeds_table(findings: Findings) -> PageTable:
    """Return the table of the mean and standard deviation, over seeds, of the lowest loss at each batch."""
    rows = [
        (results.group.title, f"{tuned.batch:,}", *_seed_cells(tuned.lowest, tuned))
        for results in findings.groups
        for tuned in results.main.batches
    ]
    head = "trials, batch, best rate tried, seeds, mean loss, deviation, best rate"
    return _table(head, rows, empty="No trial has started yet.")


def cost_table(findings: Findings) -> PageTable:
    """Return the table of time and cost by batch."""
    hourly = findings.spec.worker_hour
    batches = sorted({record.trial.batch for record in findings.records})
    parts = [(f"{batch:,}", [own for own in findings.records if own.trial.batch == batch]) for batch in batches]
    rows = []
    for label, records in [*parts, ("all", list(findings.records))]:
        seconds, worker_s = sum(record.seconds for record in records), worker_seconds(findings.spec, records)
        cost = DASH if hourly is None else dollars(worker_s / HOUR_S * hourly)
        mean = duration(seconds / len(records)) if records else DASH
        rows.append((label, f"{len(records):,}", duration(seconds), mean, duration(worker_s), cost))
    return _table("batch, trials, wall time of all, mean wall time, worker time, cost", rows)


def worker_seconds(spec: StudySpec, records: Iterable[TrialRecord]) -> float:
    """Return the time in seconds for which trials held a worker's resources. A packed trial holds its share of them."""
    return sum(record.worker_seconds for record in records) * spec.share


def verdict_table(results: GroupFindings) -> PageTable | None:
    """Return the table of the verdicts of each fit on each rule, or None if there are none."""
    laws = [(tuning, law) for tuning in results.tunings for law in tuning.laws if law.verdicts]
    if not laws:
        return None
    head = [Cell("rule"), Cell("exponent", "n")]
    for tuning, law in laws:
        under = "" if tuning is results.main else f"under {tuning.rules[0]}, "
        fit = f"{law.fit.exponent:.2f} ({interval_text(law.fit.interval)})"
        head.append(Cell(f"{under}batches {law.batches}", note=fit))
    exponents = {verdict.rule: verdict.exponent for _, law in laws for verdict in law.verdicts}
    rows = [
        (Cell(rule), Cell(f"{exponent:g}", "n"), *(_verdict_cell(rule, law) for _, law in laws))
        for rule, exponent in exponents.items()
    ]
    return PageTable(tuple(head), tuple(rows))


def predictions_table(findings: Findings) -> PageTable:
    """Return the table that compares the predictions of the rules with the tuned rates, in rate and loss."""
    rows = []
    for results in findings.groups:
        for prediction in results.predictions:
            rates = (
                bounded(prediction.rate, prediction.bound),
                bounded(prediction.tuned, prediction.tuned_bound),
                _after_bound(prediction.ratio, ".2f"),
            )
            losses = (
                _loss_text(prediction),
                bounded(prediction.tuned_loss, prediction.tuned_loss_bound),
                _after_bound(prediction.cost, "+.3g"),
            )
            rows.append((results.group.title, prediction.rule, f"{prediction.batch:,}", *rates, *losses))
    head = "trials, rule, batch, predicted rate, best rate, ratio, loss there, lowest loss, difference"
    empty = "A rule scales from one batch to another, but the study has only one batch."
    return _table(head, rows, text_columns=(0, 1), empty=empty)


def trials_table(findings: Findings) -> PageTable:
    """Return the table of the first TRIALS_SHOWN trials."""
    target = findings.spec.target
    rows = []
    for record in findings.records[:TRIALS_SHOWN]:
        trial = record.trial
        steps = inf if target is None else record.steps_to(target)
        loss = number(record.last_loss) if isfinite(record.last_loss) else DASH
        axes = (
            trial.optimizer,
            trial.rule,
            f"{trial.batch:,}",
            number(trial.base_lr),
            number(record.lr),
            f"{trial.warmup:,}",
        )
        ended = loss, f"{steps:,.0f}" if isfinite(steps) else DASH, duration(record.seconds)
        rows.append((*axes, f"{trial.seed}", record.state, *ended))
    head = "optimizer, rule, batch, base rate, rate, warmup, seed, state, loss, steps to target, time"
    return _table(head, rows, text_columns=(0, 1, 7), empty="There are no trials.")


def bounded(value: float | None, bound: Bound | None) -> str:
    """Return a value with its bound, such as `0.02` or `≥ 0.02`."""
    return DASH if value is None else " ".join(filter(None, (bound, number(value))))


def _after_bound(value: tuple[Bound | None, float] | None, digits: str) -> str:
    return DASH if value is None else " ".join(filter(None, (value[0], format(value[1], digits))))


def _table(head: str, rows: Iterable[Sequence[str]], text_columns: Sequence[int] = (0,), empty: str = "") -> PageTable:
    """Return a table. Columns other than `text_columns` have numbers and are aligned to the right; `head` has commas between them."""
    head_row, *others = (
        tuple(Cell(printable(text), "" if place in text_columns else "n") for place, text in enumerate(row))
        for row in (head.split(", "), *rows)
    )
    return PageTable(head_row, tuple(others), empty)


def _trial_row(spec: StudySpec, record: TrialRecord) -> dict[str, object]:
    cost = None if spec.worker_hour is None else worker_seconds(spec, [record]) / HOUR_S * spec.worker_hour
    return {**trial_row(spec, record), "dollars": cost}


def _seed_cells(point: RatePoint | None, tuned: AtBatch) -> tuple[str, ...]:
    if point is None:
        return (DASH,) * 5
    best = bounded(tuned.optimum.rate, tuned.optimum.bound) if tuned.optimum else DASH
    deviation = DASH if point.deviation is None else number(point.deviation, 2)
    return number(point.rate), f"{len(point.losses)}", number(point.loss), deviation, best


def _verdict_cell(rule: RuleName, law: Law) -> Cell:
    """Return the verdict on a rule. "Not rejected" is evidence for a rule only if the same interval rejects another rule."""
    judgement: str = next((verdict.judgement for verdict in law.verdicts if verdict.rule == rule), "not tested")
    if judgement == "not rejected" and not law.tells_apart:
        return Cell("not distinguished", "v-not-tested")
    return Cell(judgement, f"v-{judgement.replace(' ', '-')}")


def _loss_text(prediction: Prediction) -> str:
    if prediction.at_rate.loss is not None:
        return bounded(prediction.at_rate.loss, prediction.loss_bound)
    return prediction.at_rate.outcome or (DASH if prediction.bound else "not trained")
