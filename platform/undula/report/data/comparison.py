"""Comparison of several runs: the settings in which they differ, and whether they are the same training. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from undula.report.data.certificate import Certificate, agreement
from undula.report.data.cost import Cost, PriceFinder, cost_of, dollars_at
from undula.report.data.run_record import RecordedRun, leaves
from undula.report.data.summary import Floats, RunSummary, column, summarize, without_nan

IGNORED = ("name", "runs")
"""Settings that say only where a run is stored."""
MISSING = "–"
"""Value of a setting that the job of a run does not have."""


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs of a comparison."""

    label: str
    """Name that no other run of the comparison has."""
    record: RecordedRun
    summary: RunSummary
    cost: Cost | None
    """Cost of the workers; None if it is unknown."""
    step_dollars: Floats | None
    """Dollars that the workers had cost at each committed step; shape [steps]. None if a price is unknown."""


@dataclass(frozen=True)
class Agreement:
    """Comparison of the trajectories of two runs of one plan."""

    label: str
    against: str
    certificate: Certificate


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side."""

    runs: tuple[ComparedRun, ...]
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    """Dotted key of each setting that differs, and its value in each run, as JSON."""
    agreements: tuple[Agreement, ...]
    """Comparison of each run with the first one of the same plan."""
    alone: tuple[str, ...]
    """Labels of the runs whose plan or data no other run has."""

    def as_json(self) -> dict[str, Any]:
        tree: dict[str, Any] = without_nan(
            {
                "runs": [
                    {"run": run.label, **run.summary.as_json(), "cost": run.cost.as_json() if run.cost else None}
                    for run in self.runs
                ],
                "settings": {key: list(values) for key, values in self.settings},
                "agreements": [
                    {"run": agreement.label, "against": agreement.against, **agreement.certificate.as_json()}
                    for agreement in self.agreements
                ],
                "alone": list(self.alone),
            }
        )
        return tree


def compare(records: Mapping[str, RecordedRun], now: float, prices: PriceFinder, tolerance: float = 1e-5) -> Comparison:
    """Compare runs.

    Args:
        records: Runs by label.
        now: Current time in seconds since the epoch.
        prices: Prices of machines.
        tolerance: Maximum relative difference of a step's loss between runs that count as the same training.
    """
    runs = tuple(
        ComparedRun(
            label,
            record,
            summarize(record.ledger, record.job, now, record.has_driver),
            cost_of(record, prices),
            dollars_at(record, prices, column(record.ledger.steps, "time")),
        )
        for label, record in records.items()
    )
    agreements, alone = _agreements(runs, tolerance)
    return Comparison(runs, tuple(_differing(runs)), agreements, alone)


def _differing(runs: Sequence[ComparedRun]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the settings that differ, in the order of the jobs."""
    settings = [dict(leaves(run.record.job.spec)) for run in runs]
    keys = list(dict.fromkeys(key for job in settings for key in job if key not in IGNORED))
    rows = [(key, tuple(json.dumps(job[key]) if key in job else MISSING for job in settings)) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _agreements(runs: Sequence[ComparedRun], tolerance: float) -> tuple[tuple[Agreement, ...], tuple[str, ...]]:
    first: dict[str, ComparedRun] = {}
    agreements = []
    for run in runs:
        plan = run.record.job.plan_digest
        if plan in first:
            certificate = agreement(run.record, first[plan].record, tolerance)
            agreements.append(Agreement(run.label, first[plan].label, certificate))
        first.setdefault(plan, run)
    together = {label for pair in agreements for label in (pair.label, pair.against)}
    return tuple(agreements), tuple(run.label for run in runs if run.label not in together)
