"""Forward passes of a script's modules that the platform replaces for as long as the model trains.

A replacement is an attribute of the one module. What copies the module, such as `copy.deepcopy`, `AveragedModel` or pickle, copies its
attributes, and a copy with the replacement would compute with the weights of the original. So a replacement copies as what it replaces.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn


class Replacement:
    """Base class of callables that take the place of a module's forward pass. Copies of the module have their own one instead."""

    def __init__(self, module: nn.Module):
        self.replaced: Callable[..., Any] = module.forward

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the replaced method, whose copy is a method of the copy of the module."""
        return _itself, (self.replaced,)


def replace_forward(module: nn.Module, replacement: Replacement) -> Callable[[], None]:
    """Replace the forward pass of a module, and return a function that undoes this."""
    former = module.__dict__.get("forward")
    module.forward = replacement  # type: ignore[assignment]
    return partial(_restore, module, former)


def call_all(functions: Sequence[Callable[[], None]]) -> None:
    """Call functions one after another, such as those that undo several replacements."""
    for function in functions:
        function()


def _restore(module: nn.Module, former: Callable[..., Any] | None) -> None:
    if former is None:
        del module.forward
    else:
        module.forward = former


def _itself(method: Callable[..., Any]) -> Callable[..., Any]:
    return method
