"""Loss scale of runs that compute in fp16, with the rule and the defaults of torch.amp.GradScaler.

fp16 has no numbers below 6e-8, so small gradients would become 0. The loss is multiplied by the scale before the backward pass, and the
gradients are divided by it before anything reads them. If a gradient overflows, the step is skipped and the scale is lowered; after many
steps without an overflow, it is raised.
"""

import math
from dataclasses import astuple, dataclass

import numpy as np
import torch

from undula.plan.precision import PrecisionSpec
from undula.state.pieces import Piece, piece_of
from undula.train.step_part import StepPart, Update

STATE = "precision.loss_scale"
INITIAL = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000
"""Number of steps in a row without an overflow after which the scale grows."""
LONG_SKIPPED_STEPS = 25
"""Number of skipped steps in a row after which a warning says so; a dynamic scale has then been divided by 2^25."""


@dataclass(frozen=True)
class Scale:
    """Loss scale, and what its rule counts."""

    factor: float = INITIAL
    finite_steps: int = 0
    """Number of steps in a row without an overflow since the scale last changed."""
    skipped_steps: int = 0
    """Number of steps in a row up to the last one that were skipped."""

    def after(self, overflows: bool, is_dynamic: bool = True, interval: int = GROWTH_INTERVAL) -> "Scale":
        """Return the scale after one more step."""
        if overflows:
            return Scale(self.factor * (BACKOFF if is_dynamic else 1.0), 0, self.skipped_steps + 1)
        if not is_dynamic or self.finite_steps + 1 < interval:
            return Scale(self.factor, self.finite_steps + 1)
        with np.errstate(over="ignore"):
            grown = float(np.float32(self.factor * GROWTH))  # like GradScaler's scale, it may not exceed fp32
        return Scale(grown if math.isfinite(grown) else self.factor)


class LossScale(StepPart):
    """Loss scale of a run on this rank. It is the same on all ranks, because they agree on which steps overflow."""

    def __init__(self, precision: PrecisionSpec):
        self.is_used = precision.compute == "fp16"
        """Whether the loss is scaled."""
        self._is_dynamic = precision.loss_scale == "dynamic"
        first = Scale() if precision.loss_scale == "dynamic" else Scale(precision.loss_scale)
        # The state is a tensor, so that snapshots and checkpoints copy it like the weights: it changes with every step.
        self._state = torch.tensor(astuple(first), dtype=torch.float64, device="cpu")
        self._piece = piece_of(self._state)

    def state(self) -> dict[str, Piece]:
        """Return the scale for a checkpoint, as a tensor that is restored in place; empty if the loss is not scaled."""
        return {STATE: self._piece} if self.is_used else {}

    @property
    def current(self) -> Scale:
        factor, finite_steps, skipped_steps = self._state.tolist()
        return Scale(factor, int(finite_steps), int(skipped_steps))

    @property
    def factor(self) -> float | None:
        """Factor on the loss of the step; None if the loss is not scaled."""
        return self.current.factor if self.is_used else None

    def updated(self, update: Update) -> dict[str, float]:
        """Follow an update, and return the scale that it had."""
        if not self.is_used:
            return {}
        before = self.current
        after = before.after(not update.applies, self._is_dynamic, GROWTH_INTERVAL)
        self._state.copy_(torch.tensor(astuple(after), dtype=torch.float64, device="cpu"))
        return {"loss_scale": before.factor}
