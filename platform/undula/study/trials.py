"""Trials of a study: the values that each trial is trained with, and its record. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from typing import Any, Literal

from undula.plan.rules import RuleName
from undula.study.spec import Optimizer, StudySpec

State = Literal["waiting", "running", "complete", "diverged", "stopped", "failed"]
ENDED: tuple[State, ...] = ("complete", "diverged", "stopped", "failed")
RISE = 0.5
"""Rise of the last loss above the first one from which a trial counts as diverged. It is relative to the first loss or, if that is
larger, to the decrease in between. The last loss of a trial that learned nothing is close to the first one, above or below."""

ROUNDING = 1e-6
"""Fraction of a step by which an interpolated number of steps may exceed a whole number because of rounding."""


@dataclass(frozen=True)
class Trial:
    """One training run of a study."""

    batch: int
    """Number of samples per optimizer step."""
    base_lr: float
    """Learning rate at the top of the schedule, before scaling by the rule."""
    rule: RuleName
    warmup: int
    """Length of the warmup in samples, before scaling by the rule."""
    optimizer: Optimizer
    seed: int

    @property
    def name(self) -> str:
        """Name of the trial's run directory. Different trials have different names."""
        lr = f"{self.base_lr:.6g}".replace("+", "")
        return f"{self.optimizer}-{self.rule}-b{self.batch}-lr{lr}-w{self.warmup}-s{self.seed}"


@dataclass(frozen=True)
class Measurement:
    """Measurement of the study's metric during a trial."""

    samples: int
    """Number of consumed samples."""
    step: int
    """Number of committed steps."""
    loss: float
    """Value of the metric; not finite if the trial diverged."""


@dataclass(frozen=True)
class TrialRecord:
    """Course of a trial so far, according to its ledger."""

    trial: Trial
    state: State
    """State of the trial. A trial is `stopped` if the study's scheduler stopped it because it lagged behind, and `diverged` if its loss was
    not finite or ended far above its first value."""
    lr: float
    """Learning rate at the top of the schedule, after scaling by the rule. For a measured rule, it is the highest one so far."""
    curve: tuple[Measurement, ...] = ()
    """Measurements in order of samples. The first one is made before the first step."""
    noise: tuple[tuple[int, float], ...] = ()
    """Measurements of the gradient noise scale, as pairs (consumed samples, scale in samples)."""
    seconds: float = 0.0
    """Wall time of training in seconds."""
    worker_seconds: float = 0.0
    """Time of training in seconds, multiplied by the number of processes, each of which holds `StudySpec.share` of a worker."""
    message: str = ""
    """Reason why the trial failed or diverged; empty otherwise."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def loss(self) -> float:
        """Loss by which trials are compared, which is the last one, or infinity if there is none or the trial diverged."""
        return inf if self.state == "diverged" else self.last_loss

    @property
    def last_loss(self) -> float:
        """Last measured loss, also of a trial that diverged, or infinity if there is none or it is not finite."""
        last = self.curve[-1].loss if self.curve else inf
        return last if isfinite(last) else inf

    @property
    def has_diverged(self) -> bool:
        """Whether a loss is not finite, or the last loss is far above the first."""
        if not self.curve:
            return False
        losses = [point.loss for point in self.curve]
        if not all(map(isfinite, losses)):
            return True
        size = max(abs(losses[0]), losses[0] - min(losses))
        return size > 0 and losses[-1] - losses[0] > RISE * size

    @property
    def samples(self) -> int:
        """Number of consumed samples at the last measurement."""
        return self.curve[-1].samples if self.curve else 0

    def samples_to(self, target: float) -> float:
        """Return the samples until the metric first reached the target, with linear interpolation between measurements.

        The result is infinite if the metric never reached the target, or if the trial diverged.
        """
        return self._reached(target)[0]

    def steps_to(self, target: float) -> float:
        """Return the whole steps until the metric first reached the target, or infinity if it never did.

        The steps are those of the measurements, not samples divided by the batch: an epoch can end with a short step.
        """
        steps = self._reached(target)[1]
        return float(ceil(steps - ROUNDING)) if isfinite(steps) else inf

    def _reached(self, target: float) -> tuple[float, float]:
        return (inf, inf) if self.state == "diverged" else reached(self.curve, target)


def trial_row(spec: StudySpec, record: TrialRecord) -> dict[str, Any]:
    """Return a trial as values that JSON can represent. A number that does not exist or is not finite is None."""
    trial, target = record.trial, spec.target
    losses = [point.loss for point in record.curve if isfinite(point.loss)]
    steps = None if target is None else _finite(record.steps_to(target))
    return {
        "name": trial.name,
        "optimizer": trial.optimizer,
        "rule": trial.rule,
        "batch": trial.batch,
        "base_lr": trial.base_lr,
        "warmup_samples": trial.warmup,
        "seed": trial.seed,
        "state": record.state,
        "lr": _finite(record.lr),
        "last_loss": _finite(record.last_loss),
        "best_loss": min(losses, default=None),
        "samples": record.samples,
        "steps": record.curve[-1].step if record.curve else 0,
        "samples_to_target": None if target is None else _finite(record.samples_to(target)),
        "steps_to_target": None if steps is None else int(steps),
        "seconds": record.seconds,
        "worker_seconds": record.worker_seconds * spec.share,
        "message": record.message,
    }


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def reached(curve: Sequence[Measurement], target: float) -> tuple[float, float]:
    """Return the samples and the steps at which a curve first reaches the target from above, or infinity if it never does."""
    before: Measurement | None = None
    for point in curve:
        if point.loss <= target:
            if before is None or not isfinite(before.loss):
                return float(point.samples), float(point.step)
            share = (before.loss - target) / (before.loss - point.loss)
            return (
                before.samples + share * (point.samples - before.samples),
                before.step + share * (point.step - before.step),
            )
        before = point
    return inf, inf
