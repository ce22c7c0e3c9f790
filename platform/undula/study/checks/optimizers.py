"""Checks of the optimizers of `make_optimizer` against closed forms, mostly for constant gradients, in float64."""

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from undula import OptimizerConfig, make_optimizer
from undula.study.checks.rows import EXACT, Row
from undula.study.quadratic import Floats

STEPS, LR, MOMENTUM, TRUST = 10, 0.5, 0.9, 0.02


def optimizer_of(start: Tensor, lr: float, config: OptimizerConfig) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """Return a parameter that begins at `start`, and its optimizer."""
    module = nn.ParameterList([nn.Parameter(start.clone())])
    return module[0], make_optimizer(module, config, lr)


def after(
    start: Sequence[float], gradients: Sequence[Sequence[float]], is_matrix: bool = True, **config: Any
) -> Floats:
    """Return a parameter after steps with the given gradients; `is_matrix` says whether it has two dimensions."""
    shape = (1, len(start)) if is_matrix else (len(start),)
    begin = torch.tensor(start, dtype=torch.float64).reshape(shape)
    weights, optimizer = optimizer_of(begin, LR, OptimizerConfig(**config))
    for gradient in gradients:
        weights.grad = torch.tensor(gradient, dtype=torch.float64).reshape(shape)
        optimizer.step()
    return weights.detach().reshape(-1).numpy()


def sgd() -> Iterator[Row]:
    """Check SGD: a constant gradient of 1 moves by the sum of its momentum buffers, which are (1 - m^k) / (1 - m)."""
    buffers = [(1 - MOMENTUM**step) / (1 - MOMENTUM) for step in range(1, STEPS + 1)]
    ones = [[1.0]] * STEPS
    yield "sgd, constant gradient", -LR * sum(buffers), after([0.0], ones, name="sgd")[0], EXACT
    looked_ahead = sum(1 + MOMENTUM * buffer for buffer in buffers)
    yield "sgd, nesterov", -LR * looked_ahead, after([0.0], ones, name="sgd", nesterov=True)[0], EXACT
    shrunk = after([1.0], [[0.0]] * STEPS, name="sgd", momentum=0.0, weight_decay=0.1)
    yield "sgd, weight decay of a matrix", (1 - LR * 0.1) ** STEPS, shrunk[0], EXACT
    kept = after([1.0], [[0.0]] * STEPS, is_matrix=False, name="sgd", weight_decay=0.1)
    yield "sgd, weight decay of a vector", 1.0, kept[0], EXACT


def _adam_direction(gradients: Sequence[float], beta1: float, beta2: float, eps: float) -> float:
    """Return m / (sqrt(v) + eps) after some gradients, from the weighted means that the bias-corrected averages are."""
    age = np.arange(len(gradients))[::-1]
    of_gradient, of_square = beta1**age, beta2**age
    mean = float(of_gradient @ np.array(gradients) / of_gradient.sum())
    square = float(of_square @ np.square(gradients) / of_square.sum())
    return mean / (sqrt(square) + eps)


def adam() -> Iterator[Row]:
    """Check Adam, AdamW, and LAMB on a vector. The last of several gradients moves by the direction of their averages."""
    gradients = [1.0, -2.0, 4.0]
    for name, eps in (("adam", 1e-8), ("adamw", 1e-8), ("lamb", 1e-6)):
        constant = after([0.0], [[1.0]] * STEPS, is_matrix=False, name=name, eps=1.0)
        yield f"{name}, constant gradient, eps 1", -LR * STEPS / 2, constant[0], EXACT
        ends = [
            after([0.0], [[gradient] for gradient in gradients[:count]], is_matrix=False, name=name)[0]
            for count in (2, 3)
        ]
        direction = _adam_direction(gradients, 0.9, 0.999, eps)
        yield f"{name}, direction after three gradients", -LR * direction, ends[1] - ends[0], EXACT
    decayed = after([2.0], [[0.0]], name="adam", weight_decay=0.5, eps=1.0)
    yield "adam, weight decay in the gradient", 2 - LR / 2, decayed[0], EXACT
    decoupled = after([1.0], [[0.0]] * STEPS, name="adamw", weight_decay=0.1)
    yield "adamw, decoupled weight decay", (1 - LR * 0.1) ** STEPS, decoupled[0], EXACT


def lars() -> Iterator[Row]:
    """Check LARS. A gradient along the weights x makes every update trust x, so the weights are a power of a matrix."""
    start, along = [3.0, 4.0], [[0.3, 0.4]] * STEPS
    settings: dict[str, Any] = {"name": "lars", "trust_coefficient": TRUST, "weight_decay": 0.1}
    plain = after(start, along, momentum=0.0, **settings)
    yield "lars, gradient along the weights", 3 * (1 - LR * TRUST) ** STEPS, plain[0], EXACT
    for nesterov in (False, True):
        # On (x, b): b' = m b + trust x, and x' = x - lr b', or x' = x - lr (trust x + m b') with Nesterov.
        into_x = np.array([1 - LR * TRUST * (1 + MOMENTUM * nesterov), -LR * MOMENTUM * (MOMENTUM if nesterov else 1)])
        matrix = np.array([into_x, [TRUST, MOMENTUM]])
        known = float((np.linalg.matrix_power(matrix, STEPS) @ [3.0, 0.0])[0])
        yield (
            f"lars, {'nesterov' if nesterov else 'momentum'}",
            known,
            after(start, along, nesterov=nesterov, **settings)[0],
            EXACT,
        )
    across = after(start, [[-0.4, 0.3]], **settings)
    ratio = TRUST * 5 / (0.5 + 0.1 * 5)
    yield "lars, gradient across the weights", 3 - LR * ratio * (-0.4 + 0.1 * 3), across[0], EXACT
    vector = after(start, [[0.3, 0.4]], is_matrix=False, **settings)
    yield "lars, vector", 3 - LR * 0.3, vector[0], EXACT


def lamb() -> Iterator[Row]:
    """Check LAMB on a matrix: every update has the norm of the weights."""
    along = after([1.0, 1.0], [[0.7, 0.7]] * STEPS, name="lamb", weight_decay=0.1)
    yield "lamb, gradient along the weights", (1 - LR) ** STEPS, along[0], EXACT
    update = np.array([2 / 3 + 0.1 * 3, -1 / 2 + 0.1 * 4])  # g / (|g| + eps) + weight decay * x
    known = 3 - LR * 5 / float(np.linalg.norm(update)) * update[0]
    across = after([3.0, 4.0], [[2.0, -1.0]], name="lamb", weight_decay=0.1, eps=1.0)
    yield "lamb, gradient across the weights", known, across[0], EXACT


def optimizers() -> Iterator[Row]:
    """Check all optimizers."""
    yield from sgd()
    yield from adam()
    yield from lars()
    yield from lamb()
