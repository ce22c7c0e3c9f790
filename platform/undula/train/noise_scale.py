"""Measures the gradient noise scale while a run trains, from the gradients of its micro-batches.

Micro-batches are cut by the plan, not by the ranks, and their squared norms are summed exactly. So the result is a function of the
plan: up to the rounding of the gradient itself, and bit for bit where the gradient is summed exactly.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from undula.parallel.norms import real_values
from undula.plan.noise import Measured, StepNorms
from undula.state.pieces import Piece, piece_of

STATE = "measured.gradient_noise"
HELD_BYTES = 32 * 2**20
"""Bytes of gradients that a backward pass collects before it takes their norms at once."""


class NoiseScaleMeter:
    """Norms of a step's gradients by hooks, and averages of what they say.

    A hook of a parameter sees the gradient of one backward pass before it is added to those before and before engines reduce it,
    so that none need be told apart again. In the steps that are measured each gradient is read once more.

    Args:
        every_steps: steps between measurements; 0 for none.
        scale: factor by which the engine's gradients are larger than the mean over samples.
    """

    def __init__(self, every_steps: int, scale: float = 1.0):
        self._every_steps = every_steps
        self.scale = scale
        self._is_measured = self._is_on = False
        self._seen: list[Tensor] = []
        self._seen_bytes = 0
        self._parts: list[Tensor] = []
        self._squares: list[tuple[Tensor, int]] = []
        self._hooked: set[nn.Parameter] = set()
        # A tensor, so that snapshots and checkpoints take it as they take the weights: it changes with every measurement.
        self._state = torch.tensor(Measured().values(), dtype=torch.float64, device="cpu")
        self._piece = piece_of(self._state)

    def state(self) -> dict[str, Piece]:
        """What a checkpoint must hold to go on from here; restored in place."""
        return {STATE: self._piece} if self._every_steps else {}

    @property
    def measured(self) -> Measured:
        return Measured.of(*self._state.tolist())

    def begin_step(self, index: int, steps: int, trainable: Sequence[nn.Parameter]) -> None:
        """Begin an optimizer step of so many steps of the plan. Whether it is measured depends on the plan, so that all ranks do.

        Args:
            trainable: parameters that may get a gradient.
        """
        every = self._every_steps
        self._is_measured = bool(every) and (index + steps) // every > index // every
        self._squares = []
        if self._is_measured:
            for parameter in trainable:
                if parameter not in self._hooked:
                    parameter.register_hook(self._see)  # type: ignore[no-untyped-call]
                    self._hooked.add(parameter)

    def begin_backward(self) -> None:
        self._is_on = self._is_measured
        self._clear()

    def end_backward(self, samples: int) -> None:
        """End the backward pass of a micro-batch; of no samples where a rank has no share of a short step."""
        self._reduce_seen()
        if samples and self._parts:
            self._squares.append((torch.stack(self._parts).sum(), samples))
        self._is_on = False
        self._clear()

    def small_squares(self, step_samples: int) -> list[float]:
        """For each micro-batch of this rank the squared norm of its mean gradient, times its share of the step's samples.

        Waits for the device.
        """
        if not self._squares:
            return []
        # What was seen is the mean gradient times samples / step_samples, and the engine's scale.
        parts = torch.tensor([samples / step_samples for _, samples in self._squares], dtype=torch.float64)
        squares = torch.stack([square for square, _ in self._squares]).cpu()
        return [float(square) for square in squares / parts / self.scale**2]

    def keep(self, norms: StepNorms | None, clock: float) -> float | None:
        """Take in a committed step. Returns the noise scale in samples if it was measured and is finite."""
        if not self._every_steps:
            return None
        before = self.measured
        noise = before.noise.after(norms) if norms and self._is_measured else before.noise
        self._state.copy_(torch.tensor(replace(before, noise=noise, clock=clock).values(), dtype=torch.float64))
        found = noise.samples if self._is_measured else None
        return None if found in (None, float("inf")) else found

    def _see(self, gradient: Tensor) -> None:
        """Keep the gradient itself, not a view of it: autograd then leaves it alone, and adds up elsewhere."""
        if self._is_on:
            values = real_values(gradient)
            self._seen.append(values)
            self._seen_bytes += values.nbytes
            if self._seen_bytes >= HELD_BYTES:
                self._reduce_seen()

    def _reduce_seen(self) -> None:
        if self._seen:
            self._parts.append(_sum_of_squares(self._seen))
        self._seen, self._seen_bytes = [], 0

    def _clear(self) -> None:
        """Free what was seen, also by a backward pass that did not finish."""
        self._seen, self._seen_bytes, self._parts = [], 0, []


def _sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """The squared norm of all gradients together, in one kernel for each type."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for each in gradients:
        by_type.setdefault(each.dtype, []).append(each.detach())
    norms = [
        torch.stack(torch._foreach_norm(each, 2, dtype=torch.promote_types(dtype, torch.float32))).double()
        for dtype, each in by_type.items()
    ]
    return torch.cat(norms).square().sum()
