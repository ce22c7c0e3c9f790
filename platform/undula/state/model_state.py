"""The state of a model and its optimizer as one flat mapping, by names that do not depend on how either is wrapped or sharded.

Parameters and persistent buffers are state, and so is what a module returns from `get_extra_state()`. A buffer that a module
registered with `persistent=False` is not: a fresh module makes it again, so training must not change it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from undula.errors import CheckpointError
from undula.state.optimizer_state import (
    FITS,
    STATE,
    load_optimizer_state,
    optimizer_leaves,
    optimizer_state,
    state_like,
)
from undula.state.pieces import Table, dtype_named
from undula.state.values import checked, decode, encode, leaves, tensor_names

MODEL = "model."
OPTIMIZER = "optimizer."
EXTRA_STATE = "_extra_state"
"""torch's name for what `get_extra_state()` returns."""
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Names by which torch.compile and activation checkpointing hold the module that they wrap."""


def model_and_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The live tensors, sharded ones too, and JSON values of a model and its optimizer, by name.

    Returns:
        {"model.<parameter>": tensor, "optimizer.state.<parameter>.<key>": tensor, "optimizer.groups": value, ...}

    Raises:
        UsageError: A value of the state is one that no checkpoint can hold.
    """
    state = _model_state(model)  # first: fully_shard takes its own parameters back only when the state_dict is made
    return {**state, **optimizer_state(optimizer, _parameter_names(model))}


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `model_and_optimizer_state` returned. The optimizer takes over the tensors themselves, the model copies them.

    Raises:
        CheckpointError: The state is of another model or optimizer.
    """
    _load_model_state(model, state)
    load_optimizer_state(optimizer, _parameters(model), state)


def check_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if a checkpoint could not hold the state of the model and the optimizer as they are now."""
    model_and_optimizer_state(model, optimizer)


def empty_like_saved(model: nn.Module, optimizer: torch.optim.Optimizer, table: Table) -> dict[str, Tensor]:
    """Tensors into which a saved state can be copied, before `load_state` takes them over.

    Args:
        model: Its own tensors are targets.
        optimizer: It may be fresh: for state that it does not have yet there are new tensors, placed and sharded as the parameter.
        table: The tensors of the saved state.

    Raises:
        CheckpointError: The saved state is of another model.
    """
    _make_late_buffers(model, table)
    own = {
        name: value for name, value in model_and_optimizer_state(model, optimizer).items() if isinstance(value, Tensor)
    }
    parameters = _parameters(model)
    targets: dict[str, Tensor] = {}
    for name, spec in table.items():
        dtype, shape = dtype_named(spec.dtype), spec.shape
        present = own.get(name)
        if name.startswith(MODEL) and not _is_extra(name):
            if present is None or tuple(present.shape) != shape:
                found = "lacks it" if present is None else f"has it with shape {tuple(present.shape)}"
                raise CheckpointError(f"the saved state has {name!r} with shape {shape}, and the model {found}: {FITS}")
            targets[name] = present
        elif present is not None and not _is_extra(name) and (present.dtype, tuple(present.shape)) == (dtype, shape):
            targets[name] = present
        elif name.startswith(f"{STATE}.") and (owner := _owner(name, parameters)):
            targets[name] = state_like(optimizer, parameters[owner[0]], owner[1], dtype, shape)
        elif name.startswith((MODEL, OPTIMIZER)):
            targets[name] = torch.empty(shape, dtype=dtype)
    return targets


def beside_model_and_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state that are neither the model's nor the optimizer's."""
    return {name: value for name, value in state.items() if not name.startswith((MODEL, OPTIMIZER))}


def live_leaves(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[object]:
    """Every tensor and value that training may replace, in a fixed order; while they stay the same, so does the flat state.

    The elements of the tensors change in place, and the learning rate is set before each step.
    """
    yield from optimizer_leaves(optimizer)
    for module in bare_module(model).modules():
        yield from module._buffers.values()
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield from leaves(module.get_extra_state())


def live_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The model's buffers by their names in the state, a shared one under each of its names."""
    buffers = bare_module(model).named_buffers(remove_duplicate=False)
    return {f"{MODEL}{_plain(name)}": value for name, value in buffers}


def bare_module(model: nn.Module) -> nn.Module:
    """The user's own module, without DistributedDataParallel and torch.compile around it."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _model_state(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for key, value in bare_module(model).state_dict().items():
        name = MODEL + _plain(key)
        if isinstance(value, Tensor):
            state[name] = checked(name, value)
        else:
            state[name] = encode(name, value, state)
    return state


def _load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    bare = bare_module(model)
    keys = {MODEL + _plain(key): key for key in bare.state_dict()}
    found, used = {}, set(keys)
    for name, key in keys.items():
        if name not in state:
            raise CheckpointError(f"the saved state lacks {name!r}, which the model has: {FITS}")
        value = state[name]
        used.update(() if isinstance(value, Tensor) else tensor_names(value))
        found[key] = value if isinstance(value, Tensor) else decode(value, state)
    if extra := sorted(name for name in state if name.startswith(MODEL) and name not in used):
        raise CheckpointError(f"the saved state has {extra[0]!r}, which the model lacks: {FITS}")
    bare.load_state_dict(found)


def _make_late_buffers(model: nn.Module, table: Table) -> None:
    """Make buffers that are None in a fresh module, and that the saved one had filled."""
    bare = bare_module(model)
    device = next((parameter.device for parameter in bare.parameters()), None)
    for path, module in bare.named_modules(remove_duplicate=False):
        for key, value in module._buffers.items():
            name = MODEL + _plain(f"{path}.{key}" if path else key)
            if value is None and name in table:
                dtype, shape = dtype_named(table[name].dtype), table[name].shape
                setattr(module, key, torch.empty(shape, dtype=dtype, device=device))


def _parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Name of each parameter; the first one of a parameter that several modules share."""
    names: dict[Tensor, str] = {}
    for name, parameter in bare_module(model).named_parameters(remove_duplicate=False):
        names.setdefault(parameter, _plain(name))
    return names


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {_plain(name): each for name, each in bare_module(model).named_parameters(remove_duplicate=False)}


def _owner(name: str, parameters: Mapping[str, nn.Parameter]) -> tuple[str, str] | None:
    """The parameter and the key of a tensor "optimizer.state.<parameter>.<key>"; either may have dots in it."""
    owner = name.removeprefix(f"{STATE}.")
    rest = []
    while owner not in parameters:
        owner, _, last = owner.rpartition(".")
        if not owner:
            return None
        rest.append(last)
    return owner, ".".join(reversed(rest))


def _plain(name: str) -> str:
    """A name without the parts that wrappers of modules have put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _is_extra(name: str) -> bool:
    return EXTRA_STATE in name.split(".")
