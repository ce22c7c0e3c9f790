"""A study's trials: what each is trained with, and what has come of it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from typing import Any, Literal

from undula.plan.rules import RuleName
from undula.study.spec import Optimizer

State = Literal["waiting", "running", "complete", "diverged", "stopped", "failed"]
ENDED: tuple[State, ...] = ("complete", "diverged", "stopped", "failed")
RISE = 0.5
"""Of its first loss, or of what it came down by, by which a training ends above that where it diverged. One that learned nothing ends
a hair above or below it."""


@dataclass(frozen=True)
class Trial:
    """One training of a study."""

    batch: int
    """Samples per optimizer step."""
    base_lr: float
    """Before the rule."""
    rule: RuleName
    warmup: int
    """Samples, before the rule."""
    optimizer: Optimizer
    seed: int

    @property
    def name(self) -> str:
        """Of its run directory: the same for the same trial, other for any other."""
        lr = f"{self.base_lr:.6g}".replace("+", "")
        return f"{self.optimizer}-{self.rule}-b{self.batch}-lr{lr}-w{self.warmup}-s{self.seed}"


@dataclass(frozen=True)
class Measurement:
    """The study's metric, once during a training."""

    samples: int
    """That the training had consumed."""
    step: int
    """Steps that were committed."""
    loss: float
    """Not finite where it diverged."""


@dataclass(frozen=True)
class TrialRecord:
    """What has come of a trial so far, read from its ledger."""

    trial: Trial
    state: State
    """Stopped: by the study's scheduler, as it lagged behind. Diverged: its loss was not finite, or ended far above where it began."""
    lr: float
    """At the top of its schedule, after the rule; of a rule that measures, the highest there was."""
    curve: tuple[Measurement, ...] = ()
    """By samples, the first one before the first step."""
    noise: tuple[tuple[int, float], ...] = ()
    """The gradient noise scale where it was measured: samples consumed, and the scale in samples."""
    seconds: float = 0.0
    """That it trained, on the wall clock."""
    worker_seconds: float = 0.0
    """Seconds times the workers that it had."""
    message: str = ""
    """In words, where it failed."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def loss(self) -> float:
        """What the trial counts with: the last loss; infinite where there is none, or the trial diverged."""
        return inf if self.state == "diverged" else self.last_loss

    @property
    def last_loss(self) -> float:
        """As it was measured, of a trial that diverged too; infinite where it is no number."""
        last = self.curve[-1].loss if self.curve else inf
        return last if isfinite(last) else inf

    @property
    def has_diverged(self) -> bool:
        """Whether its losses say so: one is not finite, or the last is far above the first."""
        if not self.curve:
            return False
        losses = [point.loss for point in self.curve]
        if not all(map(isfinite, losses)):
            return True
        size = max(abs(losses[0]), losses[0] - min(losses))
        return size > 0 and losses[-1] - losses[0] > RISE * size

    @property
    def samples(self) -> int:
        """Consumed, as of the last measurement."""
        return self.curve[-1].samples if self.curve else 0

    def samples_to(self, target: float) -> float:
        """Samples until the metric was first at the target, in a straight line between measurements; infinite where it never was, or
        the trial diverged.
        """
        return inf if self.state == "diverged" else reached(self.curve, target)

    def steps_to(self, target: float) -> float:
        """The same in whole steps of this trial's batch."""
        samples = self.samples_to(target)
        return float(ceil(samples / self.trial.batch)) if isfinite(samples) else inf


def trial_row(record: TrialRecord, target: float | None) -> dict[str, Any]:
    """A trial as plain values, for programs; None where there is no number: a last loss that is not finite, a target not reached."""
    trial = record.trial
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
        "worker_seconds": record.worker_seconds,
        "message": record.message,
    }


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def reached(curve: Sequence[Measurement], target: float) -> float:
    """Samples at which a curve first comes down to the target; infinite where it does not."""
    before: Measurement | None = None
    for point in curve:
        if point.loss <= target:
            if before is None or not isfinite(before.loss):
                return float(point.samples)
            share = (before.loss - target) / (before.loss - point.loss)
            return before.samples + share * (point.samples - before.samples)
        before = point
    return inf
