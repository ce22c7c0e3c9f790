"""The certificate: what a run's ledger and its data's manifest prove about it, what they do not, and where it first went wrong."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from undula.data.manifest import Manifest
from undula.data.mixture import Data, load_data
from undula.data.planned import PlannedSamples
from undula.data.spec import DataSpec
from undula.errors import RunError
from undula.plan.keys import multiset_digest
from undula.plan.plan import Plan, PlanSpec
from undula.plan.rules import RULES
from undula.report.data.summary import RecordedRun, column, counted

COUNTED_ROWS = 2**30
"""Data sets of more rows are not counted row by row."""


@dataclass
class Certificate:
    """What was found, in sentences."""

    proved: list[str] = field(default_factory=list)
    not_proved: list[str] = field(default_factory=list)
    difference: str | None = None
    """The first thing that is not as it must be; None where all is well."""

    @property
    def holds(self) -> bool:
        return self.difference is None

    def as_json(self) -> dict[str, Any]:
        return {"holds": self.holds, **asdict(self)}


class _DifferenceError(Exception):
    """Ends the checking at the first difference."""


def data_of(run: RecordedRun) -> Data:
    """The data that a run was made on, from their manifests; RunError where its record does not say which.

    ManifestError, StorageError: the manifests cannot be read.
    """
    return load_data(_part(run, "data", DataSpec))


def certify(run: RecordedRun, data: Data, against: RecordedRun | None = None, tolerance: float = 1e-5) -> Certificate:
    """Check a run against its plan, and against another run of the same plan.

    Args:
        run: from its ledger.
        data: what it was made on.
        against: a run that must be the same one, such as one that was left alone.
        tolerance: largest relative difference of a step's loss, where floating point sums in another order; 0 between deterministic runs.
    """
    found = Certificate()
    try:
        plan = Plan(_part(run, "plan", PlanSpec), data.num_rows)
        if plan.digest(data.digest) != run.job.plan_digest:
            raise _DifferenceError(
                "the data's manifest or the recorded plan is not the one that the run was begun with"
            )
        _check_steps(run, plan, found)
        _check_samples(run, plan, data, found)
        _check_replayed(run, 0.0 if _is_exact(run) else tolerance, found)
        if against is not None:
            _check_against(run, against, 0.0 if _is_exact(run) and _is_exact(against) else tolerance, found)
    except _DifferenceError as difference:
        found.difference = str(difference)
    if _is_elastic(run) and against is None:
        merged = run.ledger.steps["merged_steps"].to_numpy()
        found.not_proved.append(
            f"that the losses are those of a fixed cluster: with batch: elastic, {int((merged > 1).sum())} of "
            f"{counted(len(merged), 'update')} took several global batches"
        )
    if run.ledger.steps["weights_digest"].null_count == len(run.ledger.steps):
        found.not_proved.append(
            "that the weights are the same: without `deterministic: true` no ledger has digests of them"
        )
    return found


def _is_exact(run: RecordedRun) -> bool:
    return bool(run.job.spec.get("deterministic"))


def _is_elastic(run: RecordedRun) -> bool:
    return bool(run.job.spec["plan"].get("batch") == "elastic")


def _close_keys(run: RecordedRun) -> tuple[str, ...]:
    """What need only be close: losses, and a learning rate that follows what was measured of the gradient."""
    rule = RULES.get(run.job.spec.get("schedule", {}).get("batch_rule"))
    return ("loss", "lr") if rule is not None and rule.is_measured else ("loss",)


def _part(run: RecordedRun, key: str, owner: Any) -> Any:
    try:
        return TypeAdapter(owner).validate_python(run.job.spec[key])
    except (KeyError, ValidationError) as error:
        raise RunError(
            f"job.json of {run.job.name} does not say its {key} as this version knows it: submit it again"
        ) from error


def _check_steps(run: RecordedRun, plan: Plan, found: Certificate) -> None:
    """Every step up to the newest is there, once, with the counts that the plan says."""
    steps = run.ledger.steps
    numbers = steps["step"].to_numpy()
    if not len(numbers):
        raise _DifferenceError("no step is committed")
    ends = np.cumsum(steps["merged_steps"].to_numpy())
    expected = np.concatenate([[0], ends[:-1]])
    gaps = np.flatnonzero(numbers != expected)
    if len(gaps):
        raise _DifferenceError(f"step {expected[gaps[0]]} is not in the ledger, or is there twice")
    done = int(ends[-1])
    if done > plan.total_steps:
        raise _DifferenceError(f"step {plan.total_steps} is in the ledger, and the plan ends before it")
    names = ("step", "world_size", "merged_steps", "epoch", "step_samples", "samples")
    for step, world_size, *row in zip(*(steps[name].to_pylist() for name in names), strict=True):
        count = plan.merged_steps(step, world_size)
        shapes = [plan.step(index) for index in range(step, step + count)]
        samples = sum(shape.samples for shape in shapes)
        planned = [count, shapes[0].epoch, samples, shapes[0].samples_before + samples]
        if row != planned:
            raise _DifferenceError(
                f"step {step} has (steps at once, epoch, samples, samples so far) {row}, and the plan says {planned}"
            )
    found.proved.append(f"{counted(done, 'step')}, each there once, with the samples that the plan says")
    if done < plan.total_steps:
        found.not_proved.append(f"anything of the {counted(plan.total_steps - done, 'step')} still to come")


def _check_samples(run: RecordedRun, plan: Plan, data: Data, found: Certificate) -> None:
    """Each step consumed just the samples that the plan says, and so each epoch those it should."""
    steps = run.ledger.steps
    planned = PlannedSamples(data, plan)
    times = np.zeros(data.num_rows, dtype=np.uint16) if data.num_rows <= COUNTED_ROWS else None
    whole = int(steps["merged_steps"].to_numpy().sum()) // plan.steps_per_epoch
    for step, count, digest in zip(
        *(steps[name].to_pylist() for name in ("step", "merged_steps", "sample_digest")), strict=True
    ):
        ids = np.concatenate([planned.step_ids(index) for index in range(step, step + count)])
        if multiset_digest(ids) != digest:
            raise _DifferenceError(f"step {step} consumed other samples than the plan says")
        if times is not None and step < whole * plan.steps_per_epoch:
            np.add.at(times, ids, 1)
    found.proved.append(
        f"each of them consumed just the plan's samples, {int(run.ledger.steps['samples'][-1].as_py()):,} in all"
    )
    if times is None or not whole:
        found.not_proved.append(
            "that an epoch has each sample once: " + ("it has too many to count" if whole else "none is whole yet")
        )
    else:
        found.proved += _epochs(times, whole, plan, data)


def _epochs(times: np.ndarray[Any, np.dtype[np.uint16]], whole: int, plan: Plan, data: Data) -> Iterator[str]:
    """What the counts of each sample over the whole epochs say."""
    least, most = int(times.min()), int(times.max())
    epochs = counted(whole, "whole epoch")
    if not isinstance(data, Manifest):
        first_id = 0
        for manifest in data.manifests:
            own = times[first_id : first_id + manifest.num_rows]
            first_id += manifest.num_rows
            yield f"in {epochs}, each sample of {manifest.url} was taken {own.min()} to {own.max()} times"
    elif least == most == whole:
        yield f"in {epochs}, each of {data.num_rows:,} samples was taken exactly once"
    else:
        yield f"in {epochs} with last_step: {plan.spec.last_step}, each sample was taken {least} to {most} times"


def _check_replayed(run: RecordedRun, tolerance: float, found: Certificate) -> None:
    """Steps that were done again are the same as those that stand."""
    rows, others = _alike(run.ledger.replaced, run.ledger.steps)
    if not len(rows):
        return
    if _is_elastic(run):
        found.not_proved.append(
            f"that {counted(len(rows), 'step')} done again came out the same: with batch: elastic, the steps before them may have "
            "taken their samples in other batches"
        )
        return
    largest = _compare(rows, others, tolerance, "the one that replaced it", _close_keys(run))
    found.proved.append(
        f"{counted(len(rows), 'step')} done again consumed the same samples, losses within {largest:.1e}"
    )


def _check_against(run: RecordedRun, other: RecordedRun, tolerance: float, found: Certificate) -> None:
    if other.job.plan_digest != run.job.plan_digest:
        raise _DifferenceError(f"{other.job.name} is of another plan or other data, so it says nothing of this run")
    if not len(other.ledger.steps):
        raise _DifferenceError(f"{other.job.name} has no step committed")
    steps = run.ledger.steps
    if _is_elastic(run):
        pairs = zip(_keys(steps), _keys(other.ledger.steps), strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same < min(len(steps), len(other.ledger.steps)):
            found.not_proved.append(
                f"that the run is that of {other.job.name} from step {steps['step'][same]} on: with batch: elastic, they took "
                "their samples in other batches"
            )
        steps = steps[:same]
    rows, others = _alike(steps, other.ledger.steps)
    if not len(rows):
        return
    largest = _compare(rows, others, tolerance, other.job.name, _close_keys(run))
    found.proved.append(
        f"{counted(len(rows), 'step')} as in {other.job.name}: the same samples and learning rates, losses within {largest:.1e}"
    )
    if both := int(
        (rows["weights_digest"].is_valid().to_numpy() & others["weights_digest"].is_valid().to_numpy()).sum()
    ):
        found.proved.append(f"the weights are those of {other.job.name} bit for bit, by {counted(both, 'digest')}")
    if missing := max(len(run.ledger.steps), len(other.ledger.steps)) - len(rows):
        found.not_proved.append(
            f"that the last {counted(missing, 'step')} are as in {other.job.name}: only one run has them"
        )


def _alike(rows: pa.Table, others: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The rows whose very steps another table has too, and its rows of them, in the same order."""
    places = {key: place for place, key in enumerate(_keys(others))}
    both = [(here, places[key]) for here, key in enumerate(_keys(rows)) if key in places]
    mine, theirs = ([pair[side] for pair in both] for side in (0, 1))
    return rows.take(pa.array(mine, pa.int64())), others.take(pa.array(theirs, pa.int64()))


def _keys(rows: pa.Table) -> Iterator[tuple[int, int]]:
    return zip(rows["step"].to_pylist(), rows["merged_steps"].to_pylist(), strict=True)


def _compare(rows: pa.Table, others: pa.Table, tolerance: float, name: str, close_keys: tuple[str, ...]) -> float:
    """The largest relative difference of losses; raises at the first step that differs."""
    for key in ("sample_digest", "step_samples", "lr", "weights_digest"):
        if key in close_keys:
            continue
        both = rows[key].is_valid().to_numpy() & others[key].is_valid().to_numpy()
        differing = np.flatnonzero(both & (rows[key].fill_null(0).to_numpy() != others[key].fill_null(0).to_numpy()))
        if len(differing):
            step, here, there = (
                table[of][int(differing[0])].as_py() for table, of in ((rows, "step"), (rows, key), (others, key))
            )
            raise _DifferenceError(f"step {step} has {key} {here}, and {name} has {there}")
    of_losses, *_ = [_apart(rows, others, key, tolerance, name) for key in close_keys]
    return of_losses


def _apart(rows: pa.Table, others: pa.Table, key: str, tolerance: float, name: str) -> float:
    """The largest relative difference of a column; raises at the first step where it is more than the tolerance."""
    here, there = column(rows, key), column(others, key)
    apart = np.abs(here - there) / np.maximum(np.maximum(np.abs(here), np.abs(there)), 1e-300)
    apart = np.where(np.isnan(here) & np.isnan(there), 0.0, apart)
    differing = np.flatnonzero(~(apart <= tolerance))
    if len(differing):
        first = int(differing[0])
        raise _DifferenceError(
            f"step {rows['step'][first].as_py()} has {key} {here[first]:.9g}, and {name} has {there[first]:.9g}: "
            f"{apart[first]:.1e} apart, more than {tolerance:g}"
        )
    return float(apart.max(initial=0.0))
