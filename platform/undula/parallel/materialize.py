"""Modules on the meta device, whose tensors have shapes but no memory, made real one part after another.

A model that no worker can hold as a whole is made on the meta device. Each of its units is drawn whole before it is sharded, because draws
of shards would depend on the number of workers.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn


def is_on_meta(module: nn.Module) -> bool:
    """Return whether a tensor of a module has no memory."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def problem_of_meta(module: nn.Module) -> str | None:
    """Return the reason why a module on the meta device cannot be made real, as a sentence; None if it can."""
    for name, layer in module.named_modules():
        has_tensors = any(True for _ in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)))
        if has_tensors and not callable(getattr(layer, "reset_parameters", None)):
            return (
                f"run.model() got a module on the meta device whose layer {name!r}, a {type(layer).__name__}, has no reset_parameters(), "
                "with which its values could be drawn; give it one, or make the model on the CPU"
            )
    return None


def materialize(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Give the tensors of layers memory on a device, and draw their values with `reset_parameters()`, in order.

    Args:
        layers: Layers, each of which owns its tensors. Parameters that several of them share stay shared.
        device: The device.
    """
    real: dict[nn.Parameter, nn.Parameter] = {}
    for layer in layers:
        parameters = list(layer.named_parameters(recurse=False, remove_duplicate=False))
        buffers = list(layer.named_buffers(recurse=False, remove_duplicate=False))
        for name, parameter in parameters:
            if parameter not in real:
                values = torch.empty_like(parameter, device=device)
                real[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            setattr(layer, name, real[parameter])
        for name, buffer in buffers:
            setattr(layer, name, torch.empty_like(buffer, device=device))
        if parameters or buffers:
            reset: Callable[[], object] = layer.reset_parameters  # type: ignore[assignment]
            reset()


def own_layers(module: nn.Module, units: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module and the layers inside it, without units inside it and their layers."""
    inner = set(units) - {module}

    def within(layer: nn.Module) -> Iterator[nn.Module]:
        yield layer
        for child in layer.children():
            if child not in inner:
                yield from within(child)

    return within(module)
