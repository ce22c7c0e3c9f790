"""Self-test of the arithmetic of studies. It checks fits against published numbers, and formulas against sampling.

The formulas of the rules are implemented here a second time, independently of the implementation that training uses. All random draws
are seeded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import erf, pi, sqrt

import numpy as np

from undula.study.fits import fit_pareto
from undula.study.quadratic import (
    Best,
    Floats,
    NoisyQuadratic,
    best_of,
    momentum_moments,
    sgd_moment,
    sgd_steps,
    zhang_quadratic,
)

TARGET = 0.01
"""Target loss of the noisy quadratic."""
RATES: Floats = np.logspace(-5, 0.5, 100)
"""Learning rates to try on the noisy quadratic."""
KNOWN_BEST = {
    4: Best(1_507_368, 0.0147),
    32: Best(189_425, 0.114),
    256: Best(25_881, 0.774),
    1024: Best(10_610, 1.67),
    4096: Best(8_118, 1.90),
}
"""Fewest steps and best learning rate of `zhang_quadratic` by batch. The published numbers were computed with 1e-8 added to the divisor
1 - (1 - eta h)^2 of the noise term. A unit test with the same addition reproduces them exactly. Without it, batches of 4 and 32 take
0.04 % and 0.005 % more steps."""
KNOWN_CRITICAL_BATCH, KNOWN_FEWEST_STEPS = 790.0, 7008.0
"""Critical batch in samples and fewest steps of `zhang_quadratic`."""
FITTED_BATCHES = tuple(2**exponent for exponent in range(2, 21))
"""Batches to which the hyperbola is fitted."""
KNOWN_NOISE_SCALE = 108.21
"""Noise scale, in samples, of the sampled gradients."""


@dataclass(frozen=True)
class SelfTestResult:
    """Comparison of a computed number with a known one."""

    topic: str
    what: str
    expected: float
    got: float
    tolerance: float
    """Tolerance relative to the known number."""

    @property
    def passed(self) -> bool:
        return bool(abs(self.got - self.expected) <= self.tolerance * abs(self.expected))


def self_test() -> Iterator[SelfTestResult]:
    """Run all checks, which take a few seconds, and yield each result as it arrives."""
    for topic, checks in TOPICS.items():
        for what, expected, got, tolerance in checks():
            yield SelfTestResult(topic, what, float(expected), float(got), tolerance)


def table(results: Sequence[SelfTestResult]) -> str:
    """Return the results as a table of text."""
    rows = [("", "expected", "got", "within", "")]
    rows += [
        (
            each.what,
            _figure(each.expected),
            _figure(each.got),
            f"{each.tolerance:.1%}" if each.tolerance > 1e-9 else "exact",
            "pass" if each.passed else "FAIL",
        )
        for each in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines, topic = [], ""
    for row, result in zip(rows, [None, *results], strict=True):
        if result and result.topic != topic:
            topic = result.topic
            lines.append(topic)
        cells = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"  {row[0].ljust(widths[0])}  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


Row = tuple[str, float, float, float]
"""Name of a check, expected number, computed number, and relative tolerance."""


def noisy_quadratic() -> Iterator[Row]:
    """Check the steps to the target at the best learning rate, and the hyperbola fitted to them, against Zhang et al. 2019.

    The hyperbola is not exactly the curve of the model, so the fit depends on the batches. The five batches of the known numbers alone
    give a critical batch of 924 and 6,113 fewest steps. All powers of two from 4 to 2^20 cover both arms of the hyperbola.
    """
    model = zhang_quadratic()
    found = {batch: best_of(sgd_steps(model, batch, RATES, TARGET), RATES) for batch in {*KNOWN_BEST, *FITTED_BATCHES}}
    for batch, known in KNOWN_BEST.items():
        yield f"steps to a loss of {TARGET}, batch {batch}", known.steps, found[batch].steps, 0.001
        yield f"best learning rate, batch {batch}", known.rate, found[batch].rate, 0.005
    fit = fit_pareto(FITTED_BATCHES, [found[batch].steps for batch in FITTED_BATCHES], resamples=100)
    yield "critical batch", KNOWN_CRITICAL_BATCH, fit.critical_batch, 0.01
    yield "fewest steps", KNOWN_FEWEST_STEPS, fit.fewest_steps, 0.01


def expected_losses() -> Iterator[Row]:
    """Check the closed forms of the expected loss against the mean over many sampled chains."""
    model = NoisyQuadratic(np.ones(2), np.array([1.0, 0.1]), np.array([1.0, 0.1]), np.ones(2))
    batch, rate, chains = 4.0, 0.5, 50_000
    for momentum in (0.0, 0.9):
        rng = np.random.default_rng(1)
        x, v = np.ones((chains, 2)), np.zeros((chains, 2))
        matrix = momentum_moments(model, batch, np.array([rate]), momentum)[0]
        moments = np.stack([model.start, np.zeros(2), np.zeros(2), np.ones(2)], axis=-1)[..., None]
        for step in range(1, 61):
            v = momentum * v + model.curvature * x + np.sqrt(model.noise / batch) * rng.standard_normal(x.shape)
            x = x - rate * v
            moments = matrix @ moments
            if step in (5, 60):
                sampled = float(model.loss(np.mean(x**2, axis=0)))
                if momentum:
                    closed = float(model.loss(moments[:, 0, 0]))
                else:
                    closed = float(model.loss(sgd_moment(model, batch, np.array([rate]), np.array([step])))[0])
                yield f"loss after {step} steps, momentum {momentum:g}", closed, sampled, 0.02


def noise_scale() -> Iterator[Row]:
    """Check tr(Sigma) / |G|^2, estimated from the squared norms of small and large batches.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """
    rng = np.random.default_rng(2)
    dimensions, workers, small, steps = 50, 8, 16, 10_000
    large = workers * small
    gradient = np.full(dimensions, 1 / sqrt(dimensions))  # |G|^2 = 1
    spectrum = 1 / np.arange(1, dimensions + 1)
    spectrum *= KNOWN_NOISE_SCALE / spectrum.sum()
    of_small = of_large = 0.0
    for _ in range(10):
        draws = rng.standard_normal((steps // 10, workers, dimensions))
        gradients = gradient + np.sqrt(spectrum / small) * draws
        of_small += float(np.mean(np.sum(gradients**2, axis=-1))) / 10
        of_large += float(np.mean(np.sum(gradients.mean(axis=1) ** 2, axis=-1))) / 10
    square = (large * of_large - small * of_small) / (large - small)
    trace = (of_small - of_large) / (1 / small - 1 / large)
    yield "|G|^2", 1.0, square, 0.02
    yield "tr(Sigma)", KNOWN_NOISE_SCALE, trace, 0.02
    yield "noise scale", KNOWN_NOISE_SCALE, trace / square, 0.02


def adascale() -> Iterator[Row]:
    """Check the gain r = (var + sqr) / (var / S + sqr) by its formula and by sampled gradients of S workers.

    Source: Johnson et al. 2020, arXiv:2007.05105.
    """
    variance, square, dimensions, steps = 2.0, 1.0, 20, 20_000
    rng = np.random.default_rng(3)
    for scale, known in ((4, 2.0), (10, 2.5)):
        yield f"gain at S = {scale}", known, (variance + square) / (variance / scale + square), 1e-12
        draws = rng.standard_normal((steps, scale, dimensions))
        gradients = sqrt(square / dimensions) + sqrt(variance / dimensions) * draws
        of_each = float(np.mean(np.sum(gradients**2, axis=-1)))
        of_mean = float(np.mean(np.sum(gradients.mean(axis=1) ** 2, axis=-1)))
        var = (of_each - of_mean) * scale / (scale - 1)
        sqr = of_mean - var / scale
        yield f"gain at S = {scale}, sampled", known, (var + sqr) / (var / scale + sqr), 0.02


def adam_sde() -> Iterator[Row]:
    """Check the square-root rule for Adam on a quadratic with gradients that are mostly noise.

    Source: Malladi et al. 2022, arXiv:2205.10287.

    The variance of the weights converges to rate noise^2 / (2 h (noise + epsilon)), and the noise of a batch k B is 1 / sqrt(k) of that of
    B. The square-root rule multiplies the rate by sqrt(k), divides epsilon by sqrt(k) and sets beta to 1 - k (1 - beta), which keeps the
    variance. With a small epsilon, the linear rule multiplies the variance by sqrt(k). The betas hardly affect it.
    """
    rate, betas, noise, steps = 0.01, (0.9, 0.999), 10.0, 3000
    for epsilon, kappas in ((1e-8, (2, 4, 8)), (noise, (8,))):
        base = _adam_variance(rate, betas, epsilon, noise, steps)
        for kappa in kappas:
            root = sqrt(kappa)
            scaled = (1 - kappa * (1 - betas[0]), 1 - kappa * (1 - betas[1]))
            found = _adam_variance(rate * root, scaled, epsilon / root, noise / root, steps // kappa)
            large = "" if epsilon < 1 else ", large epsilon"
            yield f"variance, square-root rule, kappa {kappa}{large}", 1.0, found / base, 0.03
            if not large:
                found = _adam_variance(rate * kappa, betas, epsilon, noise / root, steps // kappa)
                yield f"variance, linear rule, kappa {kappa}", root, found / base, 0.05


def _adam_variance(rate: float, betas: tuple[float, float], epsilon: float, noise: float, steps: int) -> float:
    """Return the stationary E[x^2] of Adam with gradient x + noise, as a mean over chains and over the second half of the steps."""
    # Single precision halves the time of this check, which is by far the longest.
    rng, chains, single = np.random.default_rng(4), 40_000, np.float32
    # The start is close to the stationary variance, so few steps are needed to approach it.
    x = noise * sqrt(rate / (2 * (noise + epsilon))) * rng.standard_normal(chains, single)
    mean, square = np.zeros(chains, single), np.full(chains, noise**2, single)
    total = 0.0
    for step in range(steps):
        gradient = x + noise * rng.standard_normal(chains, single)
        mean += (1 - betas[0]) * (gradient - mean)
        square += (1 - betas[1]) * (gradient**2 - square)
        x -= rate * mean / (np.sqrt(square) + epsilon)
        if step >= steps // 2:
            total += float(x @ x) / chains
    return total / (steps - steps // 2)


def surge() -> Iterator[Row]:
    """Check eta(B) = eta_max / (1/2 (sqrt(B_noise / B) + sqrt(B / B_noise))) for steps along signs, by its formula and by sampling.

    Source: Li et al. 2024, arXiv:2405.14578. On a loss with gradient g in each dimension and curvature h between all dimensions, the best
    rate of a step along the signs s of a gradient with noise sigma / sqrt(B) is sum g E[s] / E[s' H s]. With H = h everywhere and
    E[s] = e, this is d g e / (h (d + d (d - 1) e^2)), which has its maximum at e = 1 / sqrt(d - 1).
    """
    dimensions, gradient, curvature, sigma, steps = 101, 1.0, 1.0, 100.0, 50_000
    noise_batch = pi / 2 * (sigma / gradient) ** 2 / (dimensions - 1)  # e is about sqrt(2 B / pi) g / sigma
    highest = gradient / (2 * curvature * sqrt(dimensions - 1))

    def rate(batch: float) -> float:
        return highest / (0.5 * (sqrt(noise_batch / batch) + sqrt(batch / noise_batch)))

    batches = noise_batch * 2.0 ** np.arange(-60, 61)
    rates = [rate(float(batch)) for batch in batches]
    yield "batch of the peak over B_noise", 1.0, float(batches[np.argmax(rates)]) / noise_batch, 1e-12
    yield "rate at the peak over eta_max", 1.0, max(rates) / highest, 1e-12
    rng = np.random.default_rng(5)
    for factor in (0.25, 1.0, 4.0):
        batch = factor * noise_batch
        draws = gradient + sigma / sqrt(batch) * rng.standard_normal((steps, dimensions))
        signs = np.sign(draws).sum(axis=1)
        best = gradient * float(signs.mean()) / (curvature * float(np.mean(signs**2)))
        yield f"best rate over eta_max at {factor:g} B_noise, sampled", rate(batch) / highest, best / highest, 0.03
    chance = erf(sqrt(noise_batch / 2) * gradient / sigma)
    yield "mean sign at B_noise times sqrt(d - 1)", 1.0, chance * sqrt(dimensions - 1), 0.01


TOPICS: dict[str, Callable[[], Iterator[Row]]] = {
    "Noisy quadratic (Zhang 2019)": noisy_quadratic,
    "Expected loss, sampled": expected_losses,
    "Gradient noise scale (McCandlish 2018), sampled": noise_scale,
    "AdaScale (Johnson 2020)": adascale,
    "Adam's SDE (Malladi 2022), sampled": adam_sde,
    "Surge (Li 2024)": surge,
}
