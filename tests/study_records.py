"""Records of a study with known results: expected losses of the noisy quadratic model in closed form, and valleys around a rate."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from undula.plan.rules import RULES, RuleName
from undula.study.findings import GroupFindings, Prediction, find
from undula.study.quadratic import NoisyQuadratic, sgd_moment, zhang_quadratic
from undula.study.rates import RatePoint, rate_points
from undula.study.spec import LogRange, StudySpec
from undula.study.trials import Measurement, State, Trial, TrialRecord

MODEL = zhang_quadratic()


def noise_of(model: NoisyQuadratic, moment: np.ndarray) -> float:
    """Return the gradient noise scale tr(Sigma) / |G|^2 of a model."""
    return float(np.sum(model.count * model.noise) / np.sum(model.count * model.curvature**2 * moment))


def quadratic_record(
    trial: Trial, base: int, samples: int, scatter: float = 0.0, measurements: int = 20
) -> TrialRecord:
    """Return the record of a trial under SGD. Its losses are multiplied by e^(scatter x normal), drawn once per trial."""
    noise = noise_of(MODEL, MODEL.start) / base
    lr = trial.base_lr * RULES[trial.rule].scaled(trial.batch / base, noise).lr
    draw = np.random.default_rng([trial.seed, trial.batch, round(lr * 1e6)]).standard_normal()
    seen = np.linspace(0, samples, measurements + 1).astype(int)
    steps = seen // trial.batch
    seconds = samples / 1e5 + steps[-1] * 1e-3
    if lr * MODEL.curvature.max() >= 2:
        curve = tuple(
            Measurement(int(at), int(step), loss)
            for at, step, loss in zip(seen[:3], steps[:3], (5.0, 40.0, np.nan), strict=True)
        )
        return TrialRecord(trial, "diverged", lr, curve, (), seconds / 8, seconds / 2)
    moments = sgd_moment(MODEL, trial.batch, np.full(len(steps), lr), steps.astype(np.float64))
    losses = MODEL.loss(moments) * np.exp(scatter * draw)
    curve = tuple(
        Measurement(int(at), int(step), float(loss)) for at, step, loss in zip(seen, steps, losses, strict=True)
    )
    scales = tuple((int(at), noise_of(MODEL, moment)) for at, moment in zip(seen[1:], moments[1:], strict=True))
    return TrialRecord(trial, "complete", lr, curve, scales, seconds, 4 * seconds)


def trials_of(spec: StudySpec) -> list[Trial]:
    """Return all combinations. All rules are equal at the base batch, so it is combined only with the first one."""
    return [
        Trial(batch, rate, rule, warmup, optimizer, seed)
        for optimizer in spec.optimizers
        for place, rule in enumerate(rule for name, rule in spec.pairs() if name == optimizer)
        for warmup in spec.warmup_axis
        for batch in spec.batches
        if place == 0 or batch != spec.batches[0]
        for rate in spec.rates
        for seed in spec.seeds
    ]  # fmt: skip


def quadratic_records(
    spec: StudySpec, samples: int, scatter: float = 0.0, measurements: int = 20
) -> Sequence[TrialRecord]:
    """Return the records of all trials of a study."""
    return [quadratic_record(trial, spec.batches[0], samples, scatter, measurements) for trial in trials_of(spec)]


def study(**changes: Any) -> StudySpec:
    """Return a study of the noisy quadratic model."""
    values: dict[str, Any] = {
        "name": "quadratic", "job": "job.yaml", "batches": (16, 32, 64, 128, 256), "base_lr_range": LogRange(0.005, 1.9, 16),
        "optimizers": ("sgd",), "seeds": (0, 1), "target": 0.01,
    }  # fmt: skip
    return StudySpec(**{**values, **changes})


def record(batch: int, lr: float, loss: float, state: State = "complete", seed: int = 0, **changes: Any) -> TrialRecord:
    trial = Trial(batch, changes.pop("base_lr", lr), changes.pop("rule", "none"), 0, "sgd", seed)
    curve = (Measurement(0, 0, 9.0), Measurement(batch * 10, 10, loss))
    return TrialRecord(trial, state, lr, curve, **changes)


def points(batch: int, *outcomes: tuple[float, float, State]) -> tuple[RatePoint, ...]:
    return rate_points([record(batch, lr, loss, state) for lr, loss, state in outcomes], batch)


def valley(batch: int, best: float, rates: Sequence[float], seed: int = 0) -> list[TrialRecord]:
    return [record(batch, rate, 1 + np.log(rate / best) ** 2, seed=seed) for rate in rates]


def valleys(best: Mapping[int, float], rates: Sequence[float], seeds: Sequence[int] = (0,)) -> list[TrialRecord]:
    """Return the trials of all rates and seeds, with valleys around the best rate of each batch."""
    return [each for batch, rate in best.items() for seed in seeds for each in valley(batch, rate, rates, seed)]


def first_group(spec: StudySpec, records: Sequence[TrialRecord]) -> GroupFindings:
    """Return the findings on the first group of a study."""
    return find(spec, records).groups[0]


def prediction(spec: StudySpec, records: Sequence[TrialRecord], rule: RuleName = "linear") -> Prediction:
    """Return the first prediction of a rule."""
    return next(each for each in first_group(spec, records).predictions if each.rule == rule)
