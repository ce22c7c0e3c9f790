"""State of a model and its optimizer as one flat mapping, with names that do not depend on how either is wrapped or sharded.

The state of a model consists of its parameters, its persistent buffers, and the results of `get_extra_state()` of its modules. It excludes
buffers that were registered with `persistent=False`: a new module creates them again, so training must not change them.

Also here: names that a library numbers by a count of its process, as Keras does: the first layer is `dense`, the next one `dense_1`. A
script that makes its model once more in the same process has the same model under other names.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from undula.errors import CheckpointError
from undula.state.optimizer_state import (
    FITS,
    STATE,
    load_optimizer_state,
    optimizer_state,
    state_like,
)
from undula.state.pieces import Table, empty_tensor, is_sharded_tensor, piece_of, spec_of
from undula.state.values import checked, decode, encode, tensor_names

_COUNT = re.compile(r"_(\d+)(?=[/.]|$)")
"""Count at the end of a part of a name, as in `model.sequential_1/dense_3/kernel`."""
_END = re.compile(r"(?:_(\d+))?(?:[/.]|$)")
_Shape = tuple[int, ...]
_first: dict[tuple[tuple[str, _Shape], ...], list[str]] = {}
"""Names of the first model of each kind that this process has made for a run, by their forms without counts and by shapes."""


def first_names(shapes: Mapping[str, _Shape]) -> Mapping[str, str]:
    """Return the names with which this process made a model first, by those that it has now; empty unless counts in them have grown.

    Args:
        shapes: Shapes of the model's tensors, by name, in the order of the model.
    """
    names = list(shapes)
    first = _first.setdefault(tuple((without_counts(name), shapes[name]) for name in names), names)
    grown = all(
        count >= before
        for name, former in zip(names, first, strict=True)
        for count, before in zip(_counts(name), _counts(former), strict=True)
    )
    return dict(zip(names, first, strict=True)) if grown and names != first else {}


def without_counts(name: str) -> str:
    """Return a name without the counts in it."""
    return _COUNT.sub("", name)


def _counts(name: str) -> list[int]:
    """Return the count of each part of a name; 0 for a part without one."""
    return [int(found[1] or 0) for found in _END.finditer(name)]


MODEL = "model."
OPTIMIZER = "optimizer."
EXTRA_STATE = "_extra_state"
"""Name under which torch stores the result of `get_extra_state()`."""
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Names of the attributes in which torch.compile and activation checkpointing hold the module that they wrap."""

_renamed: WeakKeyDictionary[nn.Module, Mapping[str, str]] = WeakKeyDictionary()
"""Names in the state by those in the model, for models whose names have counts that have grown since this process made it first."""
Shapes: TypeAlias = Mapping[str, tuple[int, ...] | None]
"""Global shapes of a model's parameters and persistent buffers, by their names in the state; None for a buffer that has no tensor yet."""


def model_shapes(model: nn.Module) -> Shapes:
    """Return the shapes of the tensors that every state of a model has."""
    bare = bare_module(model)
    name_of = names_in_state(bare)
    shapes: dict[str, tuple[int, ...] | None] = {
        MODEL + name_of(key): tuple(value.shape)
        for key, value in bare.state_dict().items()
        if isinstance(value, Tensor) and not is_extra(key)
    }
    for path, module in bare.named_modules(remove_duplicate=False):
        for key in module._buffers.keys() - module._non_persistent_buffers_set:
            shapes.setdefault(MODEL + name_of(f"{path}.{key}" if path else key), None)
    return shapes


def check_shapes(shapes: Shapes, saved: Mapping[str, tuple[int, ...]], source: str, fix: str = FITS) -> None:
    """Check that a saved state has the tensors of a model, in the same shapes.

    Args:
        shapes: Shapes of the model's tensors.
        saved: Shapes of the saved tensors.
        source: Name of the saved state, for messages.
        fix: What the user can do, for messages.

    Raises:
        CheckpointError: A tensor is missing on either side or has another shape.
    """
    other, own = f"{source} is from another model", [name for name in saved if name.startswith(MODEL)]
    if shapes.keys() != set(own) and sorted(map(without_counts, shapes)) == sorted(map(without_counts, own)):
        fix = (
            "if only the numbers in names differ, because a library counts the layers that a process makes, as Keras does, let it count "
            f"anew before the model is made (keras.utils.clear_session()); otherwise {fix}"
        )
    for name, shape in shapes.items():
        if shape is None:
            continue
        short = name.removeprefix(MODEL)
        if name not in saved:
            raise CheckpointError(f"{other}: it lacks {short!r}, which the model has; {fix}")
        if saved[name] != shape:
            raise CheckpointError(
                f"{other}: its {short!r} has shape {saved[name]}, but the model's has shape {shape}; {fix}"
            )
    if extra := [name for name in own if name not in shapes and not is_extra(name)]:
        raise CheckpointError(f"{other}: it has {extra[0].removeprefix(MODEL)!r}, which the model lacks; {fix}")


def model_and_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the live tensors, which may be sharded, and the JSON values of a model and its optimizer, by name.

    Returns:
        {"model.<parameter>": tensor, "optimizer.state.<parameter>.<key>": tensor, "optimizer.groups": value, ...}

    Raises:
        UsageError: A checkpoint cannot hold a value of the state.
    """
    state = _model_state(
        model
    )  # first, because fully_shard restores its sharded parameters only when state_dict() is called
    return {**state, **optimizer_state(optimizer, parameter_names(model))}


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state that `model_and_optimizer_state` returned. The model copies the tensors; the optimizer keeps the tensors themselves.

    Raises:
        CheckpointError: The state belongs to another model or optimizer.
    """
    load_model_state(model, state)
    load_optimizer_state(optimizer, _parameters(model), state)


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the part of a state that belongs to the model, which copies the tensors.

    Raises:
        CheckpointError: The state belongs to another model.
    """
    bare = bare_module(model)
    name_of = names_in_state(bare)
    keys = {MODEL + name_of(key): key for key in bare.state_dict()}
    values, used = {}, set(keys)
    for name, key in keys.items():
        if name not in state:
            raise CheckpointError(f"the saved state lacks {name!r}, which the model has; {FITS}")
        value = state[name]
        used.update(() if isinstance(value, Tensor) else tensor_names(value))
        values[key] = value if isinstance(value, Tensor) else decode(value, state)
    if extra := sorted(name for name in state if name.startswith(MODEL) and name not in used):
        raise CheckpointError(f"the saved state has {extra[0]!r}, which the model lacks; {FITS}")
    bare.load_state_dict(values)


def model_targets(model: nn.Module, table: Table) -> dict[str, Tensor]:
    """Return tensors into which the saved state of a model can be copied before it is passed to `load_model_state`, by name.

    Args:
        model: Model, which has the shapes of the saved one (`check_shapes`). Its own tensors are returned, which may be sharded.
        table: Tensors of the saved state.
    """
    _make_late_buffers(model, table)
    own = {name: value for name, value in _model_state(model).items() if not is_extra(name)}
    return {
        name: own[name] if name in own else empty_tensor(spec) for name, spec in table.items() if name.startswith(MODEL)
    }


def aliases(model: nn.Module) -> set[str]:
    """Return the names under which the state of a model has a parameter that it also has under its first name."""
    first = set(parameter_names(model).values())
    return {MODEL + name for name in _parameters(model) if name not in first}


def check_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if a checkpoint cannot hold the current state of the model and the optimizer."""
    model_and_optimizer_state(model, optimizer)


def empty_like_saved(model: nn.Module, optimizer: torch.optim.Optimizer, table: Table) -> dict[str, Tensor]:
    """Return tensors into which a saved state can be copied before it is passed to `load_state`, by name.

    Args:
        model: Model that is being restored. Its own tensors are returned.
        optimizer: Optimizer that is being restored. For state that it does not have yet, new tensors are returned, on the device of the
            parameter and sharded in the same way.
        table: Tensors of the saved state.

    Raises:
        CheckpointError: The saved state belongs to another model.
    """
    _make_late_buffers(model, table)
    own = {
        name: value for name, value in model_and_optimizer_state(model, optimizer).items() if isinstance(value, Tensor)
    }
    parameters = _parameters(model)
    targets: dict[str, Tensor] = {}
    for name, spec in table.items():
        shape, present = spec.shape, own.get(name)
        if name.startswith(MODEL) and not is_extra(name):
            if present is None or tuple(present.shape) != shape:
                difference = "lacks it" if present is None else f"has it with shape {tuple(present.shape)}"
                raise CheckpointError(
                    f"the saved state has {name!r} with shape {shape}, but the model {difference}; {FITS}"
                )
            if (own_dtype := spec_of(piece_of(present)).dtype) != spec.dtype:
                raise CheckpointError(
                    f"the saved state has {name!r} in {spec.dtype}, and the model has it in {own_dtype}; {FITS}"
                )
            targets[name] = present
        elif present is not None and not is_extra(name) and spec_of(piece_of(present)) == spec:
            targets[name] = present
        elif name.startswith(f"{STATE}.") and (owner := _owner(name, parameters)):
            targets[name] = state_like(optimizer, parameters[owner[0]], owner[1], spec)
        elif name.startswith((MODEL, OPTIMIZER)):
            targets[name] = empty_tensor(spec)
    return targets


def beside_model_and_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state that belong to neither the model nor the optimizer."""
    return {name: value for name, value in state.items() if not name.startswith((MODEL, OPTIMIZER))}


def is_extra(name: str) -> bool:
    """Return whether a name in the state is that of a module's `get_extra_state()` or of a tensor in it."""
    return EXTRA_STATE in name.split(".")


def bare_module(model: nn.Module) -> nn.Module:
    """Return the user's own module, without the wrapper of torch.compile."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a model with their names in the state."""
    name_of = names_in_state(model)
    return [(name_of(name), parameter) for name, parameter in bare_module(model).named_parameters()]


def _model_state(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    name_of = names_in_state(model)
    for key, value in bare_module(model).state_dict().items():
        name = MODEL + name_of(key)
        if isinstance(value, Tensor):
            state[name] = checked(name, value)
        else:
            state[name] = encode(name, value, state)
    return state


def _make_late_buffers(model: nn.Module, table: Table) -> None:
    """Create buffers that are None in a new module but have values in the saved state."""
    bare, name_of = bare_module(model), names_in_state(model)
    device = next(map(_device_of, bare.parameters()), None)
    for path, module in bare.named_modules(remove_duplicate=False):
        for key, value in module._buffers.items():
            name = MODEL + name_of(f"{path}.{key}" if path else key)
            if value is None and name in table:
                setattr(module, key, empty_tensor(table[name], device))


def _device_of(parameter: Any) -> torch.device:
    """Return the device that computes with a parameter, of which a shard can wait in host memory."""
    return torch.device(parameter.device_mesh.device_type) if is_sharded_tensor(parameter) else parameter.device


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Return the name of each parameter. A parameter that several modules share has the first of its names."""
    names: dict[Tensor, str] = {}
    name_of = names_in_state(model)
    for name, parameter in bare_module(model).named_parameters(remove_duplicate=False):
        names.setdefault(parameter, name_of(name))
    return names


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    name_of, parameters = names_in_state(model), bare_module(model).named_parameters(remove_duplicate=False)
    return {name_of(name): parameter for name, parameter in parameters}


def _owner(name: str, parameters: Mapping[str, nn.Parameter]) -> tuple[str, str] | None:
    """Return the parameter and the key of a tensor "optimizer.state.<parameter>.<key>"; both may contain dots."""
    owner = name.removeprefix(f"{STATE}.")
    rest = []
    while owner not in parameters:
        owner, _, last = owner.rpartition(".")
        if not owner:
            return None
        rest.append(last)
    return owner, ".".join(reversed(rest))


def keep_names(model: nn.Module) -> None:
    """Let the state of a model have the names with which this process made it first, as a new process would, if a library counts."""
    bare = bare_module(model)
    shapes = {_plain(key): tuple(getattr(value, "shape", ())) for key, value in bare.state_dict().items()}
    if renamed := first_names(shapes):
        _renamed[bare] = renamed


def names_in_state(model: nn.Module) -> Callable[[str], str]:
    """Return a function that returns the name in the state of a tensor of a model, given that in the model."""
    renamed = _renamed.get(bare_module(model))
    return _plain if renamed is None else lambda name: renamed.get(plain := _plain(name), plain)


def _plain(name: str) -> str:
    """Return a name without the parts that wrappers of modules have added."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
