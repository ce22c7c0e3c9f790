"""Power law of the best learning rate over the batch, with an interval of its exponent that accounts for seeds. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import numpy as np
from scipy.special import ndtri, stdtrit

from undula.study.fits import Floats, Interval, PowerLaw, fit_power_law
from undula.study.rates import AtBatch, optimum_of, with_seeds

RESAMPLES = 200
"""Number of resamples of the bootstrap over seeds."""


def fit_exponent(batches: Sequence[AtBatch]) -> PowerLaw:
    """Fit a power law to the best learning rates, one for each batch, with an interval of the exponent that accounts for seeds.

    The interval is the hull of two intervals, widened by the uncertainty that the spacing of the tried rates leaves.

    - The first is Student's interval over the batches. Their scatter about the line contains all chance, including that of the seeds.
    - The second, with two seeds or more, is a bootstrap over the seeds of each batch. It covers optima that lie on a line by chance. With n
      seeds it is widened by sqrt(n / (n - 1)), because seeds lie closer to their own mean than to the true one, and by the ratio of
      Student's quantile to the normal one.

    Seeds are not points of their own: if the optima deviate from a line, more seeds would narrow the interval about a wrong slope.

    Raises:
        ValueError: Fewer than two different batches have an optimum that the tried rates bracket.
    """
    fit = fit_power_law([tuned.optimum for tuned in batches if tuned.optimum])
    used = [tuned for tuned in batches if tuned.optimum and tuned.optimum.interior]
    gaps = np.array([optimum.open for optimum in fit.used])
    away = np.log([tuned.batch for tuned in used])
    away = away - away.mean()
    open_by = float(np.abs(away) @ gaps / (away @ away))
    low, high = fit.interval.low, fit.interval.high
    seeds = min(len(tuned.seeds) for tuned in used)
    if seeds > 1 and len(used) > 2:
        drawn = _exponents_of_draws(used)
        if len(drawn):
            free = sum(len(tuned.seeds) - 1 for tuned in used)
            wider = sqrt(seeds / (seeds - 1)) * float(stdtrit(free, 0.975) / ndtri(0.975))
            below, above = np.quantile(drawn, [0.025, 0.975]) - fit.exponent
            low, high = min(low, fit.exponent + wider * float(below)), max(high, fit.exponent + wider * float(above))
    return replace(fit, interval=Interval(low - open_by, high + open_by), level=fit.level + float(gaps.mean()))


def _exponents_of_draws(used: Sequence[AtBatch], seed: int = 0) -> Floats:
    """Return exponents of resamples that draw the seeds of each batch with replacement. Optima that are only bounds are left out."""
    rng = np.random.default_rng(seed)
    exponents = []
    for _ in range(RESAMPLES):
        optima = []
        for tuned in used:
            drawn = with_seeds(tuned.points, rng.choice(tuned.seeds, len(tuned.seeds)).tolist())
            optimum = optimum_of(tuned.batch, drawn)
            optima += [optimum] if optimum and optimum.interior else []
        if len(optima) > 1:
            x, y = np.log([best.batch for best in optima]), np.log([best.rate for best in optima])
            exponents.append(float((x - x.mean()) @ y / ((x - x.mean()) @ (x - x.mean()))))
    return np.array(exponents)
