"""Whether runs of one plan on several numbers of workers are the same training, down to the bits. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from undula.report.data.certificate import agreement
from undula.report.data.run_record import RecordedRun
from undula.report.text import counted

EXACT = ("step", "step_samples", "sample_digest", "lr", "loss", "grad_norm", "weights_digest")
"""Columns of the ledger that are equal bit for bit if runs are the same training."""


@dataclass(frozen=True)
class Sameness:
    """Result of the comparison."""

    identical: bool
    """Whether all losses, gradient norms and digests are equal."""
    sentence: str
    difference: str | None = None
    """Difference that contradicts a promise of the runs; None if there is none."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def sameness(runs: Sequence[tuple[int, RecordedRun]]) -> Sameness:
    """Compare runs of one plan with the first one.

    Args:
        runs: Number of workers of each run, and the run.
    """
    (first_workers, first), *others = runs
    where = f"{workers_text(sorted({workers for workers, _ in runs}))}, in all {counted(len(runs), 'run')}"
    certificates = [(workers, agreement(run, first)) for workers, run in others]
    for workers, certificate in certificates:
        if certificate.difference:
            sizes = f"on {workers_text([workers])}, compared with {workers_text([first_workers])}"
            difference = f"{certificate.difference} ({sizes})"
            return Sameness(False, f"The runs are not the same training: {difference}.", difference)
    rows = first.ledger.steps.select(EXACT)
    if all(_text(run) == _text(first) for _, run in others):
        digests = counted(len(rows) - rows["weights_digest"].null_count, "digest")
        return Sameness(
            True,
            f"The losses and gradient norms of {counted(len(rows), 'step')} and {digests} of the weights are equal bit for bit on {where}.",
        )
    proved = next(
        (text for _, each in certificates for text in each.not_proved), "some figures differ in their last bits"
    )
    return Sameness(False, f"The runs are the same training on {where}, within rounding; not proved: {proved}.")


def _text(run: RecordedRun) -> str:
    """Return the exact columns as text, which tells any two floating-point numbers apart, and in which NaN is like NaN."""
    return repr(run.ledger.steps.select(EXACT).to_pylist())


def workers_text(sizes: Sequence[int]) -> str:
    """Return numbers of workers as text, such as `1 worker` or `1, 2 and 4 workers`."""
    if len(sizes) == 1:
        return counted(sizes[0], "worker")
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} workers"
