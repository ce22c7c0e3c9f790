"""Checks of the rules of `undula.plan.rules`, of how they reach an optimizer, and of what they are derived to preserve."""

from collections.abc import Iterator
from math import erf, inf, pi, sqrt

import numpy as np
import torch

from undula import OptimizerConfig
from undula.plan.noise import Measured, NoiseScale, StepNorms
from undula.plan.plan import Plan, PlanSpec
from undula.plan.rules import RULES, RuleName
from undula.plan.schedule import ScheduleSpec
from undula.study.checks.noise import scale
from undula.study.checks.optimizers import optimizer_of
from undula.study.checks.rows import EXACT, Row
from undula.train.learning_rate import GroupRates, StepRate, rate_for

BASE = 16
"""Number of samples of a base batch."""


def factor(rule: RuleName, kappa: float, noise: float | None = None) -> float:
    """Return the factor of a rule on the learning rate; `noise` is the noise scale in base batches."""
    return RULES[rule].scaled(kappa, noise).lr


def first_step(
    rule: RuleName, kappa: int, noise: float | None = None, **schedule: float
) -> tuple[StepRate, torch.optim.Optimizer]:
    """Return the rate of the first step of a run with `kappa` base batches per step, and an Adam optimizer with that rate."""
    plan = Plan(PlanSpec(global_batch=kappa * BASE, virtual_workers=1, epochs=1), 1000 * BASE)
    spec = ScheduleSpec(base_batch=BASE, batch_rule=rule, decay="constant", **schedule)  # type: ignore[arg-type]
    _, optimizer = optimizer_of(torch.zeros(1), 1.0, OptimizerConfig(name="adam"))
    measured = Measured() if noise is None else Measured(NoiseScale(noise * BASE, 1.0, 1.0))
    return set_rate(optimizer, spec, plan, measured), optimizer


def set_rate(optimizer: torch.optim.Optimizer, spec: ScheduleSpec, plan: Plan, measured: Measured) -> StepRate:
    """Set the settings of the first step of a run, as training does, and return its rate."""
    batch = plan.spec.global_batch
    rates = GroupRates(optimizer, spec, plan)
    rate = rate_for(spec, plan, 1, 0, {})[0].at(batch, batch, 1, measured)
    rates.set(optimizer, rate)
    return rate


def settings() -> Iterator[Row]:
    """Check the settings that each rule gives to an optimizer, by the formulas of its source."""
    for name, rule in RULES.items():
        known = rule.known
        _, optimizer = first_step(name, 4, noise=2.0)
        group = optimizer.param_groups[0]
        yield f"{name}: learning rate", known.lr, group["lr"], EXACT
        yield f"{name}: 1 - beta1", (known.one_minus_beta or 1.0) * 0.1, 1 - group["betas"][0], EXACT
        yield f"{name}: eps", known.eps * 1e-8, group["eps"], EXACT
        warmed, _ = first_step(name, 4, noise=2.0, warmup_samples=16 * BASE)
        rate = known.lr * (known.gain or 4) / (16 * known.warmup)
        yield f"{name}: learning rate in a warmup", rate, warmed.lr, EXACT


def measured_rules() -> Iterator[Row]:
    """Check the limits of the rules that follow the noise scale, and the steps that they are derived for, by sampling."""
    rules: tuple[RuleName, ...] = ("adascale", "noise_scale")
    for rule in (*rules, "surge"):
        yield f"{rule}: rate without a measurement", 1.0, factor(rule, 4), EXACT
        yield (
            f"{rule}: rate under infinite noise, kappa 4",
            2.0 if rule == "surge" else 4.0,
            factor(rule, 4, inf),
            EXACT,
        )
    rng, dimensions, steps = np.random.default_rng(3), 20, 20_000
    for kappa, gain in ((4, 2.0), (10, 2.5)):
        draws = sqrt(1 / dimensions) + sqrt(2 / dimensions) * rng.standard_normal((steps, kappa, dimensions))
        of_each = float(np.mean(np.sum(draws**2, axis=-1)))
        of_mean = float(np.mean(np.sum(draws.mean(axis=1) ** 2, axis=-1)))
        noise = scale(StepNorms(of_each, of_mean, kappa, kappa * BASE)) / BASE
        yield f"adascale: gain at S = {kappa}, sampled", gain, factor("adascale", kappa, noise), 0.02
        # A step of rate e along g changes a quadratic of curvature 1 by -e G.g + e^2 |g|^2 / 2, so the best rate is G.g / |g|^2.
        best = [
            float(sample.sum() * sqrt(1 / dimensions) / (sample**2).sum())
            for sample in (draws[:, 0], draws.mean(axis=1))
        ]
        yield (
            f"noise_scale: best rate of SGD at kappa {kappa}, sampled",
            factor("noise_scale", kappa, 2.0),
            best[1] / best[0],
            0.02,
        )


def rules() -> Iterator[Row]:
    """Check all rules except the sampled checks of Adam's."""
    yield from settings()
    yield from measured_rules()


def adam_sde() -> Iterator[Row]:
    """Check the square-root rule for Adam on a quadratic with gradients that are mostly noise.

    Source: Malladi et al. 2022, arXiv:2205.10287.

    The variance of the weights converges to rate noise^2 / (2 h (noise + epsilon)), and the noise of a batch k B is 1 / sqrt(k) of that of
    B. The rule adam_sde keeps the variance: it multiplies the rate by sqrt(k), divides epsilon by sqrt(k) and sets beta to
    1 - k (1 - beta). With a small epsilon, the linear rule multiplies the variance by sqrt(k). The betas hardly affect it.
    """
    rate, noise, steps = 0.01, 10.0, 3000
    for epsilon, kappas in ((1e-8, (2, 4, 8)), (noise, (8,))):
        base = _adam_variance("none", 1, rate, epsilon, noise, steps)
        for kappa in kappas:
            large = "" if epsilon < 1 else ", large epsilon"
            variance = _adam_variance("adam_sde", kappa, rate, epsilon, noise / sqrt(kappa), steps // kappa)
            yield f"variance, adam_sde, kappa {kappa}{large}", 1.0, variance / base, 0.03
            if not large:
                variance = _adam_variance("linear", kappa, rate, epsilon, noise / sqrt(kappa), steps // kappa)
                yield f"variance, linear, kappa {kappa}", sqrt(kappa), variance / base, 0.05


def _adam_variance(rule: RuleName, kappa: int, rate: float, epsilon: float, noise: float, steps: int) -> float:
    """Return the stationary E[x^2] of Adam under a rule with gradient x + noise, as a mean over chains and the second half of the steps."""
    # Single precision halves the time of this check, which is by far the longest.
    generator, chains = torch.Generator().manual_seed(4), 40_000
    weights, optimizer = optimizer_of(torch.zeros(chains), rate, OptimizerConfig(name="adam", eps=epsilon))
    plan = Plan(PlanSpec(global_batch=kappa, virtual_workers=1, epochs=1), steps * kappa)
    spec = ScheduleSpec(base_batch=1, batch_rule=rule, decay="constant")
    set_rate(optimizer, spec, plan, Measured())
    lr, eps = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"]
    # The start is close to the stationary variance, so few steps are needed to approach it.
    weights.data = noise * sqrt(lr / (2 * (noise + eps))) * torch.randn(chains, generator=generator)
    total = 0.0
    for step in range(steps):
        weights.grad = weights.detach() + noise * torch.randn(chains, generator=generator)
        optimizer.step()
        if step >= steps // 2:
            total += float(weights.detach().square().mean())
    return total / (steps - steps // 2)


def surge() -> Iterator[Row]:
    """Check the rule surge against steps along signs, by its formula and by sampling.

    Source: Li et al. 2024, arXiv:2405.14578, with eta(B) = eta_max / (1/2 (sqrt(B_noise / B) + sqrt(B / B_noise))). On a loss with gradient
    g in each dimension and curvature h between all dimensions, the best rate of a step along the signs s of a gradient with noise
    sigma / sqrt(B) is sum g E[s] / E[s' H s]. With H = h everywhere and E[s] = e, this is d g e / (h (d + d (d - 1) e^2)), which has its
    maximum at e = 1 / sqrt(d - 1).
    """
    dimensions, gradient, curvature, sigma, steps = 101, 1.0, 1.0, 100.0, 50_000
    noise_batch = pi / 2 * (sigma / gradient) ** 2 / (dimensions - 1)  # e is about sqrt(2 B / pi) g / sigma
    highest = gradient / (2 * curvature * sqrt(dimensions - 1))
    noise = 4.0  # the base batch is a quarter of the noise scale
    base_rate = highest * 0.8
    kappas = noise * 2.0 ** np.arange(-60, 61)
    rates = [factor("surge", float(kappa), noise) for kappa in kappas]
    yield "batch of the peak over B_noise", 1.0, float(kappas[np.argmax(rates)]) / noise, 1e-12
    yield "rate at the peak over eta_max", 1.0, max(rates) * base_rate / highest, 1e-12
    rng = np.random.default_rng(5)
    for kappa in (1.0, 4.0, 16.0):
        share = kappa / noise
        draws = gradient + sigma / sqrt(share * noise_batch) * rng.standard_normal((steps, dimensions))
        signs = np.sign(draws).sum(axis=1)
        best = gradient * float(signs.mean()) / (curvature * float(np.mean(signs**2)))
        known = factor("surge", kappa, noise) * base_rate / highest
        yield f"best rate over eta_max at {share:g} B_noise, sampled", known, best / highest, 0.03
    chance = erf(sqrt(noise_batch / 2) * gradient / sigma)
    yield "mean sign at B_noise times sqrt(d - 1)", 1.0, chance * sqrt(dimensions - 1), 0.01
