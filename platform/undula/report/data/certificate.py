"""Certificate of a run: the properties that its ledger and the manifest of its data prove or cannot prove. Pure."""

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from undula.data.planned import Data, PlannedSamples
from undula.data.script.indexed import IndexedData, recorded_data
from undula.data.spec import DataSpec
from undula.data.stored.mixture import Mixture, load_data
from undula.errors import RunError
from undula.plan.keys import multiset_digest
from undula.plan.plan import Plan, PlanSpec
from undula.plan.precision import FP32, PrecisionSpec
from undula.plan.rules import RULES
from undula.report.data.run_record import RecordedRun, leaves
from undula.report.data.same_bits import is_elastic, is_exact, reason_for_other_bits, settings_changes
from undula.report.data.summary import column, stage_of
from undula.report.text import counted
from undula.state.events import EndEvent, ValidationEvent

COUNTED_ROWS = 2**30
"""Maximum number of rows of a data set for which the certificate counts how often each row was used."""
Owner = TypeVar("Owner")


@dataclass
class Certificate:
    """Result of the checks of a run."""

    proved: list[str] = field(default_factory=list)
    """Properties that hold, as sentences."""
    not_proved: list[str] = field(default_factory=list)
    """Properties that could not be checked, as clauses that complete 'not proved: '."""
    difference: str | None = None
    """The first contradiction; None if there is none."""

    @property
    def holds(self) -> bool:
        return self.difference is None

    def as_json(self) -> dict[str, Any]:
        return {"holds": self.holds, **asdict(self)}


class _DifferenceError(Exception):
    """Ends the checks at the first contradiction."""


def data_of(run: RecordedRun) -> Data:
    """Load the manifests of the data that a run trained on, or return what is recorded of the dataset of its script.

    Raises:
        RunError: The record of the run does not name its data, or is damaged.
        ManifestError, StorageError: A manifest cannot be read.
    """
    spec = _section(run, "data", DataSpec)
    if not spec.is_of_script:
        return load_data(spec)
    try:
        return recorded_data(run.job.dataset)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"job.json of {run.job.name} has no record of the script's dataset; submit the job again"
        ) from error


def certify(run: RecordedRun, data: Data, against: RecordedRun | None = None, tolerance: float = 1e-5) -> Certificate:
    """Check a run against its plan and, if one is given, against another run of the same plan.

    Args:
        run: The run to check.
        data: The data that the run trained on.
        against: A run that must have the same trajectory, such as one without faults.
        tolerance: Maximum relative difference between two losses of a step, to allow for the order of floating-point sums, where equal bits
            are not promised.
    """
    certificate = Certificate()
    try:
        plan = Plan(_section(run, "plan", PlanSpec), data.num_rows)
        if plan.digest(data.digest, _precision(run)) != run.job.plan_digest:
            raise _DifferenceError("the manifest of the data or the recorded plan has changed since the run started")
        _check_steps(run, plan, certificate)
        _check_samples(run, plan, data, certificate)
        _check_replayed(run, 0.0 if is_exact(run) else tolerance, certificate)
        if against is not None:
            if not len(against.ledger.steps):
                raise _DifferenceError(f"{against.job.name} has no committed step, so nothing can be compared with it")
            _check_against(run, against, tolerance, certificate)
    except _DifferenceError as difference:
        certificate.difference = str(difference)
    if is_elastic(run) and against is None:
        merged = run.ledger.steps["merged_steps"].to_numpy()
        certificate.not_proved.append(
            f"that the losses are those of a fixed cluster: with batch: elastic, {int((merged > 1).sum())} of "
            f"{counted(len(merged), 'update')} consumed more than one global batch"
        )
    if changes := settings_changes(run):
        certificate.not_proved.append(f"that the steps are those of one script: {'; '.join(changes)}")
    if isinstance(data, IndexedData) and not data.is_checked:
        certificate.not_proved.append(
            "that the samples had the same content throughout: the dataset has no fingerprint, and run.dataset() got no name="
        )
    if run.ledger.steps["weights_digest"].null_count == len(run.ledger.steps):
        certificate.not_proved.append(
            "that the weights are the same: the run has no digests of them, which it records every few steps"
        )
    return certificate


def agreement(run: RecordedRun, other: RecordedRun, tolerance: float = 1e-5) -> Certificate:
    """Compare a run with another one of the same plan, without looking at their data.

    Args:
        run: The run.
        other: The run with which it is compared.
        tolerance: Maximum relative difference between two losses of a step where equal bits are not promised.
    """
    certificate = Certificate()
    try:
        _check_against(run, other, tolerance, certificate)
    except _DifferenceError as difference:
        certificate.difference = str(difference)
    return certificate


def _other_setting(run: RecordedRun, other: RecordedRun) -> str:
    """Return the first setting of the plan or the data in which two runs differ, in parentheses; nothing if there is none."""
    mine, theirs = dict(leaves(run.job.spec)), dict(leaves(other.job.spec))
    for key in sorted(mine.keys() | theirs.keys()):
        if key.startswith(("plan.", "data.", "precision.")) and mine.get(key) != theirs.get(key):
            return f" ({key} is {theirs.get(key)} there, and {mine.get(key)} here)"
    return ""


def _close_keys(run: RecordedRun) -> tuple[str, ...]:
    """Columns that need not agree exactly: losses, and the learning rate if it follows measurements of the gradient."""
    rule = RULES.get(run.job.spec.get("schedule", {}).get("batch_rule"))
    return ("loss", "lr") if rule is not None and rule.is_measured else ("loss",)


def _section(run: RecordedRun, key: str, owner: type[Owner]) -> Owner:
    """Return a section of the recorded spec as an instance of `owner`."""
    try:
        return TypeAdapter(owner).validate_python(run.job.spec[key])
    except (KeyError, ValidationError) as error:
        raise RunError(
            f"job.json of {run.job.name} has no section {key!r} that this version of Undula can read; submit the job again"
        ) from error


def _precision(run: RecordedRun) -> PrecisionSpec:
    """Return the precision of a run. Runs of versions without that section trained in fp32."""
    return _section(run, "precision", PrecisionSpec) if "precision" in run.job.spec else FP32


def _check_steps(run: RecordedRun, plan: Plan, certificate: Certificate) -> None:
    """Check that the ledger has each step up to the newest one exactly once, with the sample counts of the plan."""
    steps = run.ledger.steps
    numbers = steps["step"].to_numpy()
    if not len(numbers):
        raise _DifferenceError("no step has been committed")
    ends = np.cumsum(steps["merged_steps"].to_numpy())
    expected = np.concatenate([[0], ends[:-1]])
    gaps = np.flatnonzero(numbers != expected)
    if len(gaps):
        raise _DifferenceError(f"step {expected[gaps[0]]} is missing from the ledger or is in it twice")
    done = int(ends[-1])
    if done > plan.total_steps:
        raise _DifferenceError(f"step {plan.total_steps} is in the ledger, but the plan ends before that step")
    names = ("step", "world_size", "merged_steps", "epoch", "step_samples", "samples")
    for step, world_size, *row in zip(*(steps[name].to_pylist() for name in names), strict=True):
        count = plan.merged_steps(step, world_size)
        shapes = [plan.step(index) for index in range(step, step + count)]
        samples = sum(shape.samples for shape in shapes)
        planned = [count, shapes[0].epoch, samples, shapes[0].samples_before + samples]
        if row != planned:
            raise _DifferenceError(
                f"step {step} has (merged steps, epoch, samples, samples so far) {row}, but the plan has {planned}"
            )
    certificate.proved.append(
        f"{counted(done, 'step')}, each recorded exactly once, with as many samples as in the plan"
    )
    if done < plan.total_steps:
        rest = counted(plan.total_steps - done, "step")
        certificate.not_proved.append(f"anything about the {rest} that {_why_not_done(run, done)}")


def _why_not_done(run: RecordedRun, done: int) -> str:
    """Return why steps of the plan are missing, as the rest of a clause about them, given the number of steps that the run has."""
    ends = [event for event in run.events if isinstance(event, EndEvent) and event.step == done and event.reason]
    return f"remain, because the run stopped early: {ends[-1].reason}" if ends else "the run has not committed yet"


def _check_samples(run: RecordedRun, plan: Plan, data: Data, certificate: Certificate) -> None:
    """Check that each step consumed exactly the samples of the plan, and count the uses of each sample over whole epochs."""
    steps = run.ledger.steps
    planned = PlannedSamples(data, plan)
    uses = np.zeros(data.num_rows, dtype=np.uint16) if data.num_rows <= COUNTED_ROWS else None
    whole = int(steps["merged_steps"].to_numpy().sum()) // plan.steps_per_epoch
    for step, count, digest in zip(
        *(steps[name].to_pylist() for name in ("step", "merged_steps", "sample_digest")), strict=True
    ):
        ids = np.concatenate([planned.step_ids(index) for index in range(step, step + count)])
        if multiset_digest(ids) != digest:
            raise _DifferenceError(f"step {step} did not consume the samples of the plan")
        if uses is not None and step < whole * plan.steps_per_epoch:
            np.add.at(uses, ids, 1)
    certificate.proved.append(
        f"each of them consumed exactly the samples of the plan, {int(run.ledger.steps['samples'][-1].as_py()):,} in all"
    )
    if uses is None or not whole:
        reason = "there are too many samples to count" if whole else "no epoch is complete yet"
        certificate.not_proved.append(f"that an epoch uses each sample once: {reason}")
    else:
        certificate.proved += _epochs(uses, whole, plan, data)


def _epochs(uses: np.ndarray[Any, np.dtype[np.uint16]], whole: int, plan: Plan, data: Data) -> Iterator[str]:
    """Yield sentences on how often each sample was used in the complete epochs; `uses` has shape [rows]."""
    least, most = int(uses.min()), int(uses.max())
    epochs = counted(whole, "complete epoch")
    if isinstance(data, Mixture):
        first_id = 0
        for manifest in data.manifests:
            own = uses[first_id : first_id + manifest.num_rows]
            first_id += manifest.num_rows
            yield f"in {epochs}, each sample of {manifest.url} was used {own.min()} to {own.max()} times"
    elif least == most == whole:
        yield f"in {epochs}, each of {data.num_rows:,} samples was used exactly once"
    else:
        yield f"in {epochs} with last_step: {plan.spec.last_step}, each sample was used {least} to {most} times"


def _check_replayed(run: RecordedRun, tolerance: float, certificate: Certificate) -> None:
    """Check that both executions of each replayed step had the same result."""
    rows, others = _alike(run.ledger.replaced, run.ledger.steps)
    if not len(rows):
        return
    if is_elastic(run):
        certificate.not_proved.append(
            f"that {counted(len(rows), 'replayed step')} had the same result both times: with batch: elastic, earlier steps may have "
            "merged other global batches"
        )
        return
    if settings_changes(run):
        certificate.not_proved.append(
            f"that {counted(len(rows), 'replayed step')} had the same result both times, perhaps with other settings"
        )
        return
    largest = _compare(rows, others, tolerance, "its replay", _close_keys(run))
    certificate.proved.append(
        f"{counted(len(rows), 'replayed step')} consumed the same samples, with {_losses(largest)}"
    )


def _losses(largest: float) -> str:
    """Return how far the losses of two trainings agree, given their largest relative difference, as text."""
    return f"losses within {largest:.1e}" if largest else "identical losses"


def _check_against(run: RecordedRun, other: RecordedRun, tolerance: float, certificate: Certificate) -> None:
    if other.job.plan_digest != run.job.plan_digest:
        raise _DifferenceError(
            f"{other.job.name} has another plan or other data{_other_setting(run, other)}, so the two runs cannot be compared"
        )
    if not len(other.ledger.steps):
        certificate.not_proved.append(f"that the steps are as in {other.job.name}: that run has no committed step")
        return
    steps = run.ledger.steps
    if is_elastic(run):
        pairs = zip(_keys(steps), _keys(other.ledger.steps), strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same < min(len(steps), len(other.ledger.steps)):
            certificate.not_proved.append(
                f"that the run is the same as {other.job.name} from step {steps['step'][same]} on: with batch: elastic, the two "
                "merged different global batches"
            )
        steps = steps[:same]
    rows, others = _alike(steps, other.ledger.steps)
    if not len(rows):
        return
    reason = reason_for_other_bits(run, other)
    tolerance = tolerance if reason else 0.0
    largest = _compare(rows, others, tolerance, other.job.name, _close_keys(run))
    stages = stage_of(run.job), stage_of(other.job)
    sharded = f" (sharding.stage is {stages[0]} here and {stages[1]} there)" if any(stages) else ""
    certificate.proved.append(
        f"{counted(len(rows), 'step')} as in {other.job.name}{sharded}: the same samples and learning rates, with "
        f"{_losses(largest)}"
    )
    _compare_weights(rows, others, other.job.name, reason, certificate)
    done = {0, *(step + merged for step, merged in _keys(rows))}
    _compare_validations(run, other, done, tolerance, certificate)
    if missing := max(len(run.ledger.steps), len(other.ledger.steps)) - len(rows):
        certificate.not_proved.append(
            f"that the last {counted(missing, 'step')} are as in {other.job.name}: only one run has them"
        )


def _compare_weights(rows: pa.Table, others: pa.Table, name: str, reason: str | None, certificate: Certificate) -> None:
    """Tell whether the weights are equal bit for bit, as far as both runs have digests of them.

    Args:
        rows: Steps of a run.
        others: The same steps of the other run.
        name: Name of the other run.
        reason: Reason why rounding may differ; None if it must not, which was checked before.
        certificate: Result of the checks.
    """
    both, differing = _differing(rows, others, "weights_digest")
    if len(differing):
        step = rows["step"][int(differing[0])].as_py()
        certificate.not_proved.append(
            f"that the weights equal those of {name} bit for bit: they differ after step {step} at the latest, which is allowed because "
            f"{reason}"
        )
    elif both:
        certificate.proved.append(
            f"the weights equal those of {name} bit for bit, according to {counted(both, 'digest')}"
        )


def _differing(rows: pa.Table, others: pa.Table, key: str) -> tuple[int, Any]:
    """Return in how many rows both tables have a value of a column, and the places of those rows in which they differ."""
    both = rows[key].is_valid().to_numpy() & others[key].is_valid().to_numpy()
    unequal = rows[key].fill_null(0).to_numpy() != others[key].fill_null(0).to_numpy()
    return int(both.sum()), np.flatnonzero(both & unequal)


def _alike(rows: pa.Table, others: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return, for each of two tables, the rows of the steps that both have, in the same order."""
    places = {key: place for place, key in enumerate(_keys(others))}
    both = [(here, places[key]) for here, key in enumerate(_keys(rows)) if key in places]
    mine, theirs = ([pair[side] for pair in both] for side in (0, 1))
    return rows.take(pa.array(mine, pa.int64())), others.take(pa.array(theirs, pa.int64()))


def _keys(rows: pa.Table) -> Iterator[tuple[int, int]]:
    return zip(rows["step"].to_pylist(), rows["merged_steps"].to_pylist(), strict=True)


def _compare(rows: pa.Table, others: pa.Table, tolerance: float, name: str, close_keys: tuple[str, ...]) -> float:
    """Return the maximum relative difference of the losses.

    Raises:
        _DifferenceError: A step differs by more than the tolerance. The error is about the first one.
    """
    found: list[tuple[int, str]] = []
    for key in ("sample_digest", "step_samples", "lr", *(() if tolerance else ("weights_digest",))):
        _, differing = _differing(rows, others, key)
        if len(differing) and key not in close_keys:
            place = int(differing[0])
            step, here, there = (table[of][place].as_py() for table, of in ((rows, "step"), (rows, key), (others, key)))
            found.append(
                (place, _OTHER.get(key, f"step {{}} has {key} {here}, but {{}} has {there}").format(step, name))
            )
    largest = []
    for key in close_keys:
        here, there = column(rows, key), column(others, key)
        apart = _apart(here, there)
        largest.append(float(apart.max(initial=0.0)))
        if len(differing := np.flatnonzero(~(apart <= tolerance))):
            place = int(differing[0])
            difference = _difference(key, here[place], there[place], name, tolerance)
            found.append((place, f"step {rows['step'][place].as_py()} {difference}"))
    if found:
        _, text = min(found, key=lambda each: each[0])
        if not any(largest) and text.startswith("the weights"):
            text += f", although the losses of {counted(len(rows), 'step')} are equal"
        raise _DifferenceError(text)
    return largest[0]


_OTHER = {
    "sample_digest": "step {} consumed other samples than in {}",
    "weights_digest": "the weights after step {} are not those of {}",
}
"""Sentences about columns whose values say nothing to a reader, with places for the step and the name of the other run."""


def _compare_validations(
    run: RecordedRun, other: RecordedRun, steps: Collection[int], tolerance: float, certificate: Certificate
) -> None:
    """Compare the means of the validations of both runs after the same steps and over as many samples.

    Raises:
        _DifferenceError: A mean differs by more than the tolerance.
    """
    mine, theirs = (
        {(event.step, event.samples): event.means for event in each.events if isinstance(event, ValidationEvent)}
        for each in (run, other)
    )
    both = sorted(key for key in mine.keys() & theirs.keys() if key[0] in steps)
    for key in both:
        for of in mine[key].keys() & theirs[key].keys():
            here, there = mine[key][of], theirs[key][of]
            if not _apart(np.array([here]), np.array([there]))[0] <= tolerance:
                difference = _difference(of, here, there, other.job.name, tolerance)
                raise _DifferenceError(f"the validation after step {key[0]} {difference}")
    if both:
        certificate.proved.append(f"{counted(len(both), 'validation')} as in {other.job.name}")


def _apart(here: Any, there: Any) -> Any:
    """Return the relative differences of numbers, of which NaN equals itself."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(here - there) / np.maximum(np.maximum(np.abs(here), np.abs(there)), 1e-300)
    return np.where((np.isnan(here) & np.isnan(there)) | (here == there), 0.0, apart)


def _difference(key: str, here: float, there: float, name: str, tolerance: float) -> str:
    apart = float(_apart(np.array([here]), np.array([there]))[0])
    return f"has {key} {here:.9g}, but {name} has {there:.9g}: a relative difference of {apart:.1e}, more than {tolerance:g}"
