"""Measures the gradient noise scale while a run trains, from the gradients of its micro-batches.

Micro-batches are cut by the plan, not by the ranks, and their squared norms are summed exactly, so that what is measured is a function
of the plan: up to the rounding of the gradient itself, and bit for bit where that is exact.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from undula.parallel.engines.torch_engines import is_sharded
from undula.parallel.spec import GradientSpec
from undula.plan.noise import Measured, StepNorms
from undula.plan.plan import PlanSpec
from undula.plan.schedule import ScheduleSpec

STATE = "measured.gradient_noise"
HELD_BYTES = 32 * 2**20
"""Of gradients that a backward pass has come by, whose norms are taken at once."""


class NoiseMeter:
    """Norms of a step's gradients by hooks, and averages of what they tell.

    A hook of a parameter sees the gradient of one backward pass before it is added to those before, and before engines reduce it, so
    that none need be told apart again. In the steps that are measured each gradient is read once more.

    Args:
        module: the user's own, wrapped by no engine.
        every_steps: steps between measurements; 0 for none.
        scale: what the engine's gradients are multiples of the mean by.
        is_first: whether this is rank 0, which tells the others the norm of the whole gradient.
    """

    def __init__(self, module: nn.Module, every_steps: int, scale: float = 1.0, is_first: bool = True):
        self._every_steps = every_steps
        self._scale = scale
        self._is_first = is_first
        self._is_measured = self._is_on = False
        self._seen: list[Tensor] = []
        self._seen_bytes = 0
        self._parts: list[Tensor] = []
        self._squares: list[tuple[Tensor, int]] = []
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # A tensor, that snapshots and checkpoints take as they take the weights: it changes with every measurement.
        self._state = torch.tensor(Measured().values(), dtype=torch.float64, device="cpu")
        if every_steps:
            if is_sharded(module):
                raise RuntimeError(
                    "gradient.noise_every_steps, or the schedule.batch_rule, takes norms of whole gradients, and this model is sharded: "
                    "leave out one of the two"
                )
            for parameter in self._parameters:
                parameter.register_hook(self._see)  # type: ignore[no-untyped-call]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold to go on from here; restored in place."""
        return {STATE: self._state} if self._every_steps else {}

    @property
    def measured(self) -> Measured:
        return Measured.of(*self._state.tolist())

    def begin_step(self, index: int, span: int) -> None:
        """Whether a step is measured is a matter of the plan, so that all ranks do."""
        every = self._every_steps
        self._is_measured = bool(every) and (index + span) // every > index // every
        self._squares = []

    def begin_backward(self) -> None:
        self._is_on = self._is_measured
        self._forget()

    def end_backward(self, samples: int) -> None:
        """Of a micro-batch; of no samples where a rank has no share of a short step."""
        self._reduce_seen()
        if samples and self._parts:
            self._squares.append((torch.stack(self._parts).sum(), samples))
        self._is_on = False
        self._forget()

    def whole_square(self) -> Tensor | None:
        """Squared norm of the gradient that the engine has left in the parameters; on rank 0, of a step that is measured."""
        if not (self._is_measured and self._is_first):
            return None
        gradients = [_values(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        return _sum_of_squares(gradients) / self._scale**2 if gradients else None

    def small_squares(self, step_samples: int) -> list[float]:
        """Squared norms of this rank's micro-batches' mean gradients, each times its part of the step's samples. Waits for the device."""
        if not self._squares:
            return []
        # What was seen is the mean gradient times samples / step_samples, and the engine's scale.
        parts = torch.tensor([samples / step_samples for _, samples in self._squares], dtype=torch.float64)
        squares = torch.stack([square for square, _ in self._squares]).cpu()
        return [float(square) for square in squares / parts / self._scale**2]

    def keep(self, norms: StepNorms | None, clock: float) -> float | None:
        """Take in a step, as its weights are; the noise scale, where it was measured and is finite."""
        if not self._every_steps:
            return None
        before = self.measured
        noise = before.noise.after(norms) if norms and self._is_measured else before.noise
        self._state.copy_(torch.tensor(replace(before, noise=noise, clock=clock).values(), dtype=torch.float64))
        found = noise.samples if self._is_measured else None
        return None if found in (None, float("inf")) else found

    def _see(self, gradient: Tensor) -> None:
        """Hold on to the gradient itself, no view of it: autograd then leaves it alone, and adds up elsewhere."""
        if self._is_on:
            values = _values(gradient)
            self._seen.append(values)
            self._seen_bytes += values.nbytes
            if self._seen_bytes >= HELD_BYTES:
                self._reduce_seen()

    def _reduce_seen(self) -> None:
        if self._seen:
            self._parts.append(_sum_of_squares(self._seen))
        self._seen, self._seen_bytes = [], 0

    def _forget(self) -> None:
        """What was seen of a backward pass that did not come to its end, too."""
        self._seen, self._seen_bytes, self._parts = [], 0, []


def every_steps(gradient: GradientSpec, schedule: ScheduleSpec, plan: PlanSpec) -> int:
    """Steps between measurements: where the learning rate follows them, each."""
    return 1 if schedule.is_measured(plan) else gradient.noise_every_steps


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Over all of them, in as few kernels as they have types."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for each in gradients:
        by_type.setdefault(each.dtype, []).append(each.detach())
    norms = [
        torch.stack(torch._foreach_norm(each, 2, dtype=torch.promote_types(dtype, torch.float32))).double()
        for dtype, each in by_type.items()
    ]
    return torch.cat(norms).square().sum()
