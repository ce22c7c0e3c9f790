"""Measurement of the gradient noise scale during training, from the gradients of the micro-batches.

Micro-batches are defined by the plan, not by the ranks, and the squared norms of their parameters' gradients are summed exactly. The result
therefore depends only on the plan.
"""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from undula.errors import UsageError
from undula.parallel.reduce.accumulator import ShowGradient
from undula.plan.noise import Measured, StepNorms
from undula.state.pieces import Piece, piece_of
from undula.state.squares import square_sums
from undula.train.step_part import StepPart, Update

STATE = "measured.gradient_noise"
HELD_BYTES = 32 * 2**20
"""Size in bytes of the gradients that a backward pass collects before it computes their norms together."""


class NoiseScaleMeter(StepPart):
    """Computes the norms of a step's gradients in hooks, and averages the estimates of the noise scale.

    An engine shows the gradient of each parameter in one backward pass, before it is accumulated and before the engine reduces it. The
    gradients of micro-batches are therefore still separate. A step that is measured reads each gradient one more time.

    Args:
        every_steps: Number of steps between measurements; 0 for none.
        scale: Factor by which the engine's gradients are larger than the mean over samples.
        watch: Function that lets a function see the gradients of a step.
    """

    def __init__(
        self, every_steps: int, scale: float = 1.0, watch: Callable[[ShowGradient], None] = lambda _show: None
    ):
        self._every_steps, self.watch = every_steps, watch
        self.scale = scale
        self._is_measured = self._is_on = False
        self._collected: list[Tensor] = []
        self._collected_bytes = 0
        self._parts: list[Tensor] = []
        self._seen: set[Hashable] = set()
        """Parameters of which the backward pass has computed a gradient."""
        self._squares: list[tuple[Tensor, int]] = []
        """Squared norm of each parameter's gradient in a micro-batch, of shape [parameters], and number of samples in the micro-batch."""
        # The state is a tensor, so that snapshots and checkpoints copy it like the weights: it changes with every measurement.
        self._state = torch.tensor(Measured().values(), dtype=torch.float64, device="cpu")
        self._piece = piece_of(self._state)

    def state(self) -> dict[str, Piece]:
        """Return the measurements for a checkpoint, as a tensor that is restored in place; empty if nothing is measured."""
        return {STATE: self._piece} if self._every_steps else {}

    @property
    def measured(self) -> Measured:
        return Measured.of(*self._state.tolist())

    def begin_step(self, index: int, merged_steps: int) -> None:
        """Begin an optimizer step. The plan decides whether the step is measured, so that all ranks agree."""
        every = self._every_steps
        self._is_measured = bool(every) and (index + merged_steps) // every > index // every
        self._squares = []
        if self._is_measured:
            self.watch(self._collect)

    def begin_backward(self) -> None:
        self._is_on = self._is_measured
        self._clear()

    def end_micro_batch(self, samples: int, virtual_worker: int) -> None:
        self._reduce_collected()
        if samples and self._parts:
            self._squares.append((torch.cat(self._parts), samples))
        self._is_on = False
        self._clear()

    def small_squares(self, step_samples: int, loss_scale: float = 1.0) -> list[float]:
        """Return the squared norm of the mean gradient of each micro-batch of this rank, times its share of the step's samples.

        This waits for the device.

        Args:
            step_samples: Number of samples in the step.
            loss_scale: Factor on the losses of the step.
        """
        if not self._squares:
            return []
        # The hooks received the mean gradient times samples / step_samples, the engine's scale and the loss scale.
        values = iter(torch.cat([squares for squares, _ in self._squares]).tolist())
        return [
            _sum(islice(values, len(squares))) / (samples / step_samples) / (self.scale * loss_scale) ** 2
            for squares, samples in self._squares
        ]

    def updated(self, update: Update) -> dict[str, float]:
        """Add the measurement of a step to the averages, and return its noise scale in samples, if it has one."""
        norms = update.totals.norms(update.step.samples, self.scale) if update.applies else None
        noise = self.keep(norms, update.clock)
        return {} if noise is None else {"noise_scale": noise}

    def keep(self, norms: StepNorms | None, clock: float) -> float | None:
        """Add the measurement of a committed step to the averages.

        Args:
            norms: Gradient norms of the step, which are ignored if the step is not measured; None for a step that is skipped.
            clock: Position of the schedule after the step, in samples of the base batch.

        Returns:
            The noise scale in samples, or None if the step is not measured or skipped, or the noise scale is not finite.
        """
        if not self._every_steps:
            return None
        before, is_measured = self.measured, self._is_measured and norms is not None
        noise = before.noise.after(norms) if norms and is_measured else before.noise
        after = replace(before, noise=noise, clock=clock)
        self._state.copy_(torch.tensor(after.values(), dtype=torch.float64, device="cpu"))
        samples = noise.samples if is_measured else None
        return None if samples in (None, float("inf")) else samples

    def _collect(self, parameter: Hashable, gradient: Tensor) -> None:
        """Collect the gradient itself, not a view of it, because autograd then accumulates into another tensor instead of changing it.

        Raises:
            UsageError: The backward pass has computed another part of the gradient of this parameter before.
        """
        if self._is_on:
            if parameter in self._seen:
                raise UsageError(
                    "a backward pass computes the gradient of a layer in several parts, of which the gradient noise scale cannot be "
                    "measured; if the model uses activation checkpointing, set use_reentrant=False"
                )
            self._seen.add(parameter)
            self._collected.append(gradient)
            self._collected_bytes += gradient.values().nbytes if gradient.is_sparse else gradient.nbytes
            if self._collected_bytes >= HELD_BYTES:
                self._reduce_collected()

    def _reduce_collected(self) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for gradient in self._collected:
            by_type.setdefault(gradient.dtype, []).append(gradient)
        # One sum for each gradient, because which gradients are collected together depends on the engine.
        self._parts += [square_sums([[each] for each in gradients]).double() for gradients in by_type.values()]
        self._collected, self._collected_bytes = [], 0

    def _clear(self) -> None:
        """Free the collected gradients and norms, including those of a backward pass that did not finish."""
        self._collected, self._collected_bytes, self._parts, self._seen = [], 0, [], set()


def _sum(squares: Iterable[float]) -> float:
    """Return the sum of numbers of at least 0, rounded once, so that it does not depend on their order."""
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf
