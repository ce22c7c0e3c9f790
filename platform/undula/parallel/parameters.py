"""Parameters of a module, and the features that they require of an engine."""

import torch
from torch import nn

from undula.parallel.capabilities import Feature
from undula.state.pieces import is_sharded


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
