"""Base class of all engines."""

from collections.abc import Set
from operator import is_
from typing import ClassVar

import torch
from torch import Tensor, nn

from undula.errors import UsageError
from undula.parallel.capabilities import Capabilities, Feature, refusal
from undula.parallel.collectives import broadcast_from_rank_0
from undula.parallel.device_clock import Mark
from undula.parallel.layout import Layout
from undula.parallel.norms import clip_gradients, gradient_norm
from undula.parallel.precision import Autocast, unscale
from undula.plan.plan import MicroBatch
from undula.state.pieces import Piece, is_sharded_tensor


class Engine:
    """Places a model, runs its backward passes, combines the gradients of all ranks, and steps the optimizer.

    `place` and `prepare` are called once. Each step begins with `begin_step`, calls `before_forward` and `backward` for each micro-batch,
    and ends with `finish_gradients` and `step`. The weight of a micro-batch's loss is the micro-batch's share of the step's samples, so
    that the plain sum over micro-batches and ranks is the mean over the step for any assignment of virtual workers.

    If a parameter has no gradient on any rank, its gradient is None after `finish_gradients`, so that no optimizer changes the parameter,
    whatever the number of ranks.

    This class trains on a single rank. Subclasses implement the communication between ranks.

    Args:
        layout: Layout of the worker group.
    """

    capabilities: ClassVar[Capabilities]

    def __init__(self, layout: Layout):
        self.layout = layout
        self.parameters: list[nn.Parameter] = []
        self.trainable: list[nn.Parameter] = []
        """Parameters that require a gradient: the same list until these change."""
        self.gradients_ready: Mark | None = None
        """Time from which only the reduction of the step remained; None if the reduction does not overlap with the backward pass."""
        self.begun_in_backward = 0
        """Number of collectives of torch.distributed that the last backward pass of the step has begun; 0 before it."""
        self.settings: Set[Feature] = frozenset()
        """Features that the job's settings require. The model may require others once the script has unfrozen parameters."""
        self._autocast: Autocast | None = None

    def place(self, module: nn.Module) -> nn.Module:
        """Move a module to the device, and copy the weights of rank 0 to every rank.

        Returns:
            The module that the script calls.
        """
        self.module = module.to(self.layout.device)
        broadcast_from_rank_0(self.module, self.layout.everyone)
        self._find_parameters()
        self.lay_out()
        return self.module

    def compute_in(self, dtype: torch.dtype) -> None:
        """Compute the model's forward and backward pass in a 16-bit dtype. Called after `place`. Outputs and gradients remain fp32."""
        self._autocast = Autocast(self.module, self.layout.device, dtype)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Accept the module that `place` returned, and the optimizer that `step` is to step."""
        self.optimizer = optimizer

    def lay_out(self) -> None:
        """Prepare the reduction of the gradients of `trainable`; called again after the script has frozen or unfrozen parameters."""

    def begin_step(self, micro_batches: int) -> None:
        """Begin a step in which this rank runs `micro_batches` micro-batches.

        Raises:
            UsageError: The script has unfrozen or added parameters that cannot be trained with the job's settings.
        """
        if self._find_parameters():
            if problem := refusal(self.settings | features_of_model(self.module)):
                raise UsageError(problem)
            self.lay_out()
        self.begun_in_backward = 0

    def _find_parameters(self) -> bool:
        """Find the parameters of the module, and return whether others require a gradient than before."""
        self.parameters = parameters_of(self.module)
        found = [parameter for parameter in self.parameters if parameter.requires_grad]
        if len(found) == len(self.trainable) and all(map(is_, found, self.trainable)):
            return False
        self.trainable = found
        return True

    def before_forward(self, is_last: bool) -> None:
        """Prepare the forward pass of a micro-batch. `is_last` is true for the last micro-batch of the step on this rank."""

    def backward(self, loss: Tensor, weight: float, micro_batch: MicroBatch, is_last: bool) -> None:
        """Compute the gradients of a micro-batch and add them to the gradients of the step.

        Args:
            loss: Mean loss over the micro-batch's samples, a scalar.
            weight: Factor on the loss.
            micro_batch: Micro-batch of the loss. It has no samples if this rank has no share of a short step and only runs the model
                because the other ranks do.
            is_last: Whether it is the last micro-batch of the step on this rank.
        """
        # A gradient of zero would differ from none: with momentum, it would move a parameter that no sample uses.
        if micro_batch.samples or self.capabilities.equal_rounds:
            (loss * weight).backward()  # type: ignore[no-untyped-call]

    def finish_gradients(
        self, samples: int, max_norm: float | None, loss_scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Reduce the gradients of a step of `samples` samples, and clip them to `max_norm` unless that is None.

        Args:
            samples: Number of samples in the step.
            max_norm: Maximum norm of the gradient.
            loss_scale: Factor on the losses of the step, by which the gradients are divided again; None for none.

        Returns:
            Norm of the gradient before clipping, and whether the step must be skipped because a scaled gradient overflowed on this rank.
            Both are scalars on the device.
        """
        self.reduce_gradients(samples)
        parameters = self.parameters
        overflows = torch.zeros((), device="cpu") if loss_scale is None else unscale(parameters, loss_scale)
        norm = gradient_norm(parameters)
        if max_norm is not None:
            clip_gradients(parameters, max_norm, norm)
        return norm, overflows

    def reduce_gradients(self, samples: int) -> None:
        """Replace the gradients of this rank by the gradients of the step over all ranks."""

    def step(self, applies: bool = True) -> None:
        """Step the optimizer, unless the step is skipped, and free the gradients."""
        if applies:
            self.optimizer.step()
        self.free_gradients()

    def free_gradients(self) -> None:
        """Free all gradients, including the gradients of parameters that the optimizer does not have."""
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        """Remove what the engine has attached to the model. Without this, the model can stay in memory although nothing uses it."""
        if self._autocast:
            self._autocast.remove()

    def state(self) -> dict[str, Piece]:
        """Return the engine's own tensors that change from step to step, by name. They are restored in place."""
        return {}


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require a gradient."""
    return [parameter for parameter in parameters_of(module) if parameter.requires_grad]


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return all parameters in the order of `module.parameters()`, which is slow because it makes their names."""
    modules: dict[nn.Module, None] = {}
    ahead: list[nn.Module | None] = [module]
    while ahead:
        each = ahead.pop()
        if each is not None and each not in modules:
            modules[each] = None
            ahead.extend(reversed(each._modules.values()))
    found = (parameter for each in modules for parameter in each._parameters.values() if parameter is not None)
    return list({id(parameter): parameter for parameter in found}.values())


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the trainable parameters with sparse gradients, which are those of layers made with sparse=True."""
    layers = [layer for layer in module.modules() if getattr(layer, "sparse", False) is True]
    return {each for layer in layers for each in layer.parameters(recurse=False) if each.requires_grad}


def features_of_model(module: nn.Module) -> set[Feature]:
    """Return the features that a module requires of its engine. Parameters that are frozen need none for their gradients or updates."""
    asked = {
        Feature.SHARDED: any(map(is_sharded_tensor, module.parameters())),
        Feature.SPARSE_GRADIENTS: bool(sparse_parameters(module)),
        Feature.HALF_PARAMETERS: any(each.dtype in (torch.bfloat16, torch.float16) for each in trainable(module)),
    }
    return {feature for feature, is_asked in asked.items() if is_asked}
