"""Copies of a model's parameters in 16 bits, which take their place in counted passes as gathered parameters do in those of a run."""

import torch
from torch import nn


class GatheredCopies:
    """Copies of the parameters of a module, which take the place of the parameters from `put_in` to `put_back`.

    Args:
        module: The module.
        dtype: Floating-point type of the copies.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        self._places = [
            (layer, name, parameter)
            for layer in module.modules()
            for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False)
        ]
        every = dict.fromkeys(parameter for _, _, parameter in self._places)
        self._copies = {each: nn.Parameter(each.detach().to(dtype), each.requires_grad) for each in every}
        self._computed: dict[nn.Parameter, None] = {}
        """Parameters whose copies have had a gradient."""

    def put_in(self) -> None:
        """Put the copies in the place of the parameters."""
        for layer, name, parameter in self._places:
            setattr(layer, name, self._copies[parameter].requires_grad_(parameter.requires_grad))

    def put_back(self) -> None:
        """Put the parameters back, and free the gradients of the copies."""
        for layer, name, parameter in self._places:
            setattr(layer, name, parameter)
        for parameter, copy in self._copies.items():
            if copy.grad is not None:
                self._computed[parameter], copy.grad = None, None

    def give_gradients(self) -> None:
        """Give each parameter a gradient of its own dtype, if its copy had one since the last call."""
        for parameter in self._computed:
            parameter.grad = torch.empty_like(parameter)
        self._computed.clear()
