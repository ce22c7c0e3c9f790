"""Contract of the accumulators, each of which combines the gradients of all virtual workers into the gradient of a step.

Also here: hooks of whole parameters, which show the gradient of each backward pass before it is accumulated.

Also here: parameters of a module, and the features that they require of an engine.

Also here: norm of a step's gradient, and clipping of the gradient to a maximum norm.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from undula.parallel.capabilities import Feature
from undula.parallel.collectives import OwnCollectives
from undula.parallel.device_clock import Mark
from undula.plan.plan import MicroBatch
from undula.state.pieces import is_sharded, local_part
from undula.state.squares import square_sums


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return all parameters in the order of `module.parameters()`, which is slow because it makes their names."""
    modules: dict[nn.Module, None] = {}
    ahead: list[nn.Module | None] = [module]
    while ahead:
        following = ahead.pop()
        if following is not None and following not in modules:
            modules[following] = None
            ahead.extend(reversed(following._modules.values()))
    parameters = (parameter for owner in modules for parameter in owner._parameters.values() if parameter is not None)
    return list({id(parameter): parameter for parameter in parameters}.values())


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require a gradient."""
    return [parameter for parameter in parameters_of(module) if parameter.requires_grad]


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the trainable parameters with sparse gradients, which are those of layers made with sparse=True."""
    layers = [layer for layer in module.modules() if getattr(layer, "sparse", False) is True]
    parameters = (parameter for layer in layers for parameter in layer.parameters(recurse=False))
    return {parameter for parameter in parameters if parameter.requires_grad}


def features_of_model(module: nn.Module) -> set[Feature]:
    """Return the features that a module requires of its engine. Parameters that are frozen need none for their gradients or updates."""
    asked = {
        Feature.SHARDED: is_sharded(module),
        Feature.SPARSE_GRADIENTS: bool(sparse_parameters(module)),
        Feature.HALF_PARAMETERS: any(
            parameter.dtype in (torch.bfloat16, torch.float16) for parameter in trainable(module)
        ),
    }
    return {feature for feature, is_asked in asked.items() if is_asked}


ShowGradient: TypeAlias = Callable[[Hashable, Tensor], None]
"""Function that gets each gradient that a backward pass computes, with something that stands for the parameter."""


class GradientHooks:
    """Hooks of the parameters of a model of which each rank has the whole."""

    def __init__(self) -> None:
        self._hooked: set[nn.Parameter] = set()

    def attach(self, parameters: Sequence[nn.Parameter], show: ShowGradient) -> None:
        """Show the gradients of parameters from now on. Parameters that have a hook keep it."""
        for parameter in parameters:
            if parameter not in self._hooked:
                parameter.register_hook(partial(show, len(self._hooked)))  # type: ignore[no-untyped-call]
                self._hooked.add(parameter)


class Accumulator:
    """Accumulates the gradients of this rank's micro-batches, and combines them with the gradients of the other ranks.

    A step begins with `open`. Each micro-batch calls `before_forward`, `before_backward` and, if it has samples, `add`. `finish` stores the
    gradient of the step in the parameters, or None in a parameter that has no gradient on any rank. A rank runs the micro-batches of one
    virtual worker after those of another, so a virtual worker is complete when a micro-batch of another one begins.

    This class is for models of a single rank: autograd adds up the gradients in the parameters.

    Args:
        module: Module on its device. An accumulator is made anew when other parameters require a gradient.
    """

    def __init__(self, module: nn.Module):
        self.parameters = trainable(module)
        self.ready: Mark | None = None
        """Time at which the backward pass of the step's last micro-batch began its latest collective; None if it has begun none."""
        self.collectives = OwnCollectives()
        """Collectives of torch.distributed that the passes of micro-batches have begun."""

    def open(self, work: Sequence[MicroBatch]) -> None:
        """Begin a step in which this rank runs some micro-batches. The last step may not have been finished."""

    def before_forward(self) -> None:
        """Prepare the forward pass of a micro-batch."""

    def before_backward(self, micro_batch: MicroBatch, is_last: bool) -> None:
        """Prepare the backward pass of a micro-batch, which may have no samples. `is_last` is true for the rank's last one in the step."""

    def add(self, micro_batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch, which its backward pass has left in the parameters.

        Parameters can get gradients of one memory, such as those of `a` and `b` in `a.unsqueeze(0) + b.unsqueeze(0)` (torch 2.13). What the
        next backward pass adds to one of them would be added to the other one as well, so they get memory of their own here.
        """
        known: set[int] = set()
        for parameter in self.parameters:
            gradient = parameter.grad
            if type(gradient) is Tensor and not gradient.is_sparse and (place := gradient.data_ptr()):
                if place in known:
                    parameter.grad = gradient.clone()
                known.add(place)

    def finish(self, samples: int) -> None:
        """Combine the gradients over the ranks, in a step of `samples` samples, and store the result in the parameters."""

    def close(self) -> None:
        """Remove what is attached to the parameters. Without this, the model can stay in memory although nothing uses it."""


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients together, as a scalar tensor.

    If ranks have shards of the gradients, it is the norm of the whole gradients, and all ranks must call this. It does not wait for a GPU.
    """
    by_precision: dict[bool, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_precision.setdefault(parameter.grad.dtype.to_real() == torch.float64, []).append(parameter.grad)
    sums = [square_sums([gradients]) for gradients in by_precision.values()]
    return torch.cat(sums).sum().sqrt() if sums else torch.tensor(0.0, device="cpu")


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients so that their norm becomes `max_norm`, if their present norm `norm` is larger.

    The factor is that of `torch.nn.utils.clip_grads_with_norm_`, which would take a fifth of a second in the first step on shards.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    dense: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad * factor
        elif parameter.grad is not None:
            gradient = local_part(parameter.grad)
            dense.setdefault(gradient.device, []).append(gradient)
    for device, gradients in dense.items():
        torch._foreach_mul_(gradients, factor.to(device))
