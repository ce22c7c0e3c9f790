"""Gradients of an open step, which a script's own calls of `zero_grad` must not delete."""

from torch import nn
from torch.optim import Optimizer


def keep_gradients(*owners: nn.Module | Optimizer) -> None:
    """Let `zero_grad` of a model and of its optimizer do nothing, because the gradients of several virtual workers add up in the model.

    The run frees them when the optimizer has taken the step.
    """
    for owner in owners:
        owner.zero_grad = _keep  # type: ignore[method-assign]


def free_gradients(model: nn.Module) -> None:
    """Free what a script has left in the model between two steps, where it may have computed gradients of its own."""
    nn.Module.zero_grad(model)


def _keep(set_to_none: bool = True) -> None:
    """Do nothing. A function of the module, so that a model with it can be copied and pickled."""
