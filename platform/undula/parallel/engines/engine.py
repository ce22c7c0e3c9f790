"""The contract of an engine, and what engines have in common."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from undula.parallel.capabilities import Capabilities
from undula.parallel.collectives import broadcast_from_rank_0
from undula.parallel.device_clock import Mark
from undula.parallel.layout import Layout
from undula.parallel.norms import clip_gradients, gradient_norm
from undula.plan.plan import MicroBatch
from undula.state.pieces import Piece


class Engine:
    """Places a model, runs its backward passes, combines the gradients of all ranks, and steps the optimizer.

    The loop calls `place` and `prepare` once; then for each step `begin_step`; for each micro-batch `before_forward` and
    `backward`; and at the end of the step `finish_gradients` and `step`. Each loss comes with its weight, its share of the
    step's samples, so that the plain sum over micro-batches and ranks is the mean over the step for any assignment of virtual
    workers.

    A parameter that has no gradient on any rank has None after `finish_gradients`, so that no optimizer moves it, whatever the
    number of ranks.

    This class runs one rank by itself. Subclasses define what happens between ranks.

    Args:
        layout: the ranks of the worker group.
    """

    capabilities: ClassVar[Capabilities]

    def __init__(self, layout: Layout):
        self.layout = layout
        self.gradients_ready: Mark | None = None
        """Time at which the last gradient of the step was computed and only the reduction remained; None if the two do not overlap."""

    def place(self, module: nn.Module) -> nn.Module:
        """Move a module to the device, with the weights of rank 0 on every rank. Returns the module that the script calls."""
        self.module = module.to(self.layout.device)
        broadcast_from_rank_0(self.module, self.layout.everyone)
        self.trainable = trainable(self.module)
        self.lay_out()
        return self.module

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer that `step` steps, and the module that `place` returned."""
        self.optimizer = optimizer

    def lay_out(self) -> None:
        """Prepare the reduction of the gradients of `trainable`. It is called again when the script freezes or unfreezes parameters."""

    def begin_step(self, micro_batches: int) -> None:
        """Begin a step in which this rank runs `micro_batches` micro-batches."""
        found = trainable(self.module)
        if len(found) != len(self.trainable) or any(a is not b for a, b in zip(found, self.trainable, strict=True)):
            self.trainable = found
            self.lay_out()

    def before_forward(self, is_last: bool) -> None:
        """Called before the forward pass of a micro-batch. `is_last` marks the last one of the step on this rank."""

    def backward(self, loss: Tensor, weight: float, micro_batch: MicroBatch, is_last: bool) -> None:
        """Compute the gradients of a micro-batch and add them to those of the step.

        Args:
            loss: mean over the micro-batch's samples, a scalar.
            weight: factor on the loss.
            micro_batch: The micro-batch. It has no samples if this rank runs the model only because others do, in a short step.
            is_last: whether it is the last of the step on this rank.
        """
        (loss * weight).backward()  # type: ignore[no-untyped-call]

    def finish_gradients(self, samples: int, max_norm: float | None) -> Tensor:
        """Leave the gradient of a step of `samples` samples in the parameters, clipped to `max_norm` unless that is None.

        Returns:
            The norm of the gradient before clipping, a scalar on the device.
        """
        self.reduce_gradients(samples)
        parameters = list(self.module.parameters())
        norm = gradient_norm(parameters)
        if max_norm is not None:
            clip_gradients(parameters, max_norm, norm)
        return norm

    def reduce_gradients(self, samples: int) -> None:
        """Replace the gradients of this rank by those of the step over all ranks."""

    def step(self) -> bool:
        """Step the optimizer and free the gradients. Returns whether the step was applied; mixed precision may skip it."""
        self.optimizer.step()
        self.free_gradients()
        return True

    def free_gradients(self) -> None:
        """Free all gradients, including those of parameters that the optimizer does not have."""
        self.module.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Piece]:
        """Tensors of the engine's own that change from step to step, by name. They are restored in place."""
        return {}


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that need a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
