"""Checks of the noisy quadratic model, of the hyperbola fitted to it, and of its expected loss under the optimizer sgd."""

from collections.abc import Iterator

import numpy as np
import torch

from undula import OptimizerConfig
from undula.study.checks.optimizers import optimizer_of
from undula.study.checks.rows import Row
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


def noisy_quadratic() -> Iterator[Row]:
    """Check the steps to the target at the best learning rate, and the hyperbola fitted to them, against Zhang et al. 2019.

    The hyperbola is not exactly the curve of the model, so the fit depends on the batches. The five batches of the known numbers alone
    give a critical batch of 924 and 6,113 fewest steps. All powers of two from 4 to 2^20 cover both arms of the hyperbola.
    """
    model = zhang_quadratic()
    best = {batch: best_of(sgd_steps(model, batch, RATES, TARGET), RATES) for batch in {*KNOWN_BEST, *FITTED_BATCHES}}
    for batch, known in KNOWN_BEST.items():
        yield f"steps to a loss of {TARGET}, batch {batch}", known.steps, best[batch].steps, 0.001
        yield f"best learning rate, batch {batch}", known.rate, best[batch].rate, 0.005
    fit = fit_pareto(FITTED_BATCHES, [best[batch].steps for batch in FITTED_BATCHES], resamples=100)
    yield "critical batch", KNOWN_CRITICAL_BATCH, fit.critical_batch, 0.01
    yield "fewest steps", KNOWN_FEWEST_STEPS, fit.fewest_steps, 0.01


def expected_losses() -> Iterator[Row]:
    """Check the closed forms of the expected loss against the mean over many chains that the optimizer sgd trains."""
    model = NoisyQuadratic(np.ones(2), np.array([1.0, 0.1]), np.array([1.0, 0.1]), np.ones(2))
    batch, rate, chains = 4.0, 0.5, 50_000
    for momentum in (0.0, 0.9):
        generator = torch.Generator().manual_seed(1)
        x, optimizer = optimizer_of(
            torch.ones(chains, 2, dtype=torch.float64), rate, OptimizerConfig(name="sgd", momentum=momentum)
        )
        curvature, deviation = torch.from_numpy(model.curvature), torch.from_numpy(np.sqrt(model.noise / batch))
        matrix = momentum_moments(model, batch, np.array([rate]), momentum)[0]
        moments = np.stack([model.start, np.zeros(2), np.zeros(2), np.ones(2)], axis=-1)[..., None]
        for step in range(1, 61):
            draws = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            x.grad = curvature * x.detach() + deviation * draws
            optimizer.step()
            moments = matrix @ moments
            if step in (5, 60):
                sampled = float(model.loss(x.detach().square().mean(dim=0).numpy()))
                if momentum:
                    closed = float(model.loss(moments[:, 0, 0]))
                else:
                    closed = float(model.loss(sgd_moment(model, batch, np.array([rate]), np.array([step])))[0])
                yield f"loss after {step} steps, momentum {momentum:g}", closed, sampled, 0.02
