"""Hooks of whole parameters, which show the gradient of each backward pass before it is accumulated."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

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
