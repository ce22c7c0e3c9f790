"""State of an optimizer by the names of its parameters: exactly the entries that the optimizer holds, including those added in training."""

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from undula.errors import CheckpointError, UsageError
from undula.state.pieces import TensorSpec, dtype_named, empty_tensor, is_sharded_tensor, local_part, shard_with
from undula.state.values import checked, decode, encode, leaves

STATE = "optimizer.state"
ENTRIES = "optimizer.entries"
GROUPS = "optimizer.groups"
SHARED = "optimizer.shared"
EXTRAS = "optimizer.extras"
COMPUTING = ("foreach", "fused", "capturable", "differentiable")
"""Settings of a group that say how torch computes a step, for example on which device. They are no part of the state."""
FITS = "restore the previous settings, set another name, or start over with --fresh"
"""Fix for a saved state that belongs to another model or optimizer, for messages."""


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Return the tensors of an optimizer by name, and four JSON values that describe where each tensor belongs.

    Args:
        optimizer: Optimizer, which is not changed: a parameter that never had a gradient has no state.
        names: Name of each parameter of the model.

    Raises:
        UsageError: The optimizer holds a parameter that the model lacks, or a value that a checkpoint cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    state = {}
    for owner, entries in optimizer.state.items():
        if isinstance(owner, Tensor):
            name = _name_of(owner, names)
            _refuse_odd_shards(f"{STATE}.{name}", owner, entries)
            state[name] = encode(f"{STATE}.{name}", dict(entries), tensors)
    shared = {owner: entries for owner, entries in optimizer.state.items() if not isinstance(owner, Tensor)}
    groups = encoded_groups(optimizer, names, tensors)
    others = {SHARED: encode(SHARED, shared, tensors), EXTRAS: encode(EXTRAS, _extras(optimizer), tensors)}
    return {**tensors, ENTRIES: state, GROUPS: groups, **others}


def encoded_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tensors: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer as JSON, with the names of their parameters.

    Args:
        optimizer: The optimizer.
        names: Name of each parameter of the model.
        tensors: Dictionary to which the tensors among the settings are added, by name.

    Raises:
        UsageError: The optimizer holds a parameter that the model lacks, or a setting that a checkpoint cannot hold.
    """
    return [
        {
            "parameters": [_name_of(parameter, names) for parameter in group["params"]],
            "settings": {
                key: encode(f"{GROUPS}.{number}.{key}", value, tensors)
                for key, value in group.items()
                if key != "params"
            },
        }
        for number, group in enumerate(optimizer.param_groups)
    ]


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if the optimizer's `step` requires a closure that runs the model again, which a run does not support."""
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} needs a closure that runs the model several times in one step, which a run does not "
            "support; use an optimizer whose step() needs no argument"
        )


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]
) -> None:
    """Load a state that `optimizer_state` returned. The optimizer keeps the tensors themselves, without copying them.

    Args:
        optimizer: Optimizer. It also gets the parameter groups and parameters that were added during training.
        parameters: Parameters of the model by name.
        state: Tensors and values by name.

    Raises:
        CheckpointError: The optimizer has other parameters or parameter groups than the saved one.
    """
    _load_groups(optimizer, parameters, state)
    _load_entries(optimizer, parameters, state)
    if extras := decode(state[EXTRAS], state):
        # Only the optimizer's own load_state_dict can set entries other than groups and parameters. It also casts the state of
        # each parameter to the parameter's dtype, so that state is loaded again afterwards.
        optimizer.load_state_dict({**optimizer.state_dict(), **extras})
        _load_groups(optimizer, parameters, state)
        _load_entries(optimizer, parameters, state)


def state_like(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str, spec: TensorSpec) -> Tensor:
    """Return an empty tensor for an entry of a parameter's state, on the device on which torch's optimizers keep such an entry."""
    if spec.shape == tuple(parameter.shape) and key != "step" and (is_sharded_tensor(parameter) or not spec.strides):
        part = torch.empty_like(local_part(parameter), dtype=dtype_named(spec.dtype), requires_grad=False)
        return shard_with(part, parameter) if is_sharded_tensor(parameter) else part
    is_on_device = key != "step"
    for group in optimizer.param_groups:
        if any(parameter is member for member in group["params"]):
            is_on_device |= bool(group.get("capturable") or group.get("fused"))
    return empty_tensor(spec, parameter.device if is_on_device else None)


def _extras(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the entries of an optimizer's `state_dict()` that torch's optimizers do not have."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    state = optimizer.state_dict()
    if not {"state", "param_groups"} <= state.keys() or len(state["state"]) != len(optimizer.state):
        raise UsageError(
            f"the state_dict() of {type(optimizer).__name__} does not have the form of a torch optimizer's, so a run could not resume; "
            "use the optimizer that it wraps, or another one"
        )
    return {key: value for key, value in state.items() if key not in ("state", "param_groups")}


def _load_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]
) -> None:
    saved = state[GROUPS]
    if len(optimizer.param_groups) > len(saved):
        raise CheckpointError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups and the saved one has {len(saved)}; {FITS}"
        )
    for number, group in enumerate(saved):
        members = [_parameter_named(name, parameters) for name in group["parameters"]]
        settings = {key: decode(value, state, _device_of(members)) for key, value in group["settings"].items()}
        if number == len(optimizer.param_groups):
            optimizer.add_param_group({"params": members, **settings})
        present = optimizer.param_groups[number]
        if not {id(member) for member in present["params"]} <= {id(member) for member in members}:
            raise CheckpointError(
                f"parameter group {number} of the optimizer has parameters that the saved one lacks; {FITS}"
            )
        present.update({key: value for key, value in settings.items() if key not in COMPUTING or key not in present})
        present["params"] = members


def _load_entries(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]
) -> None:
    optimizer.state.clear()
    for name, entries in state[ENTRIES].items():
        parameter = _parameter_named(name, parameters)
        optimizer.state[parameter] = decode(entries, state)
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.update(decode(state[SHARED], state, _device_of(members)))


def _device_of(members: list[nn.Parameter]) -> torch.device | None:
    return members[0].device if members else None


def _name_of(parameter: Tensor, names: Mapping[Tensor, str]) -> str:
    if parameter not in names:
        raise UsageError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model lacks; "
            "create the optimizer from the parameters of the module that run.model(...) returns; if they are those of several modules, "
            "join these first, as in nn.ModuleDict"
        )
    return names[parameter]


def _parameter_named(name: str, parameters: Mapping[str, nn.Parameter]) -> nn.Parameter:
    if name not in parameters:
        raise CheckpointError(f"the saved optimizer has the parameter {name!r}, which the model lacks; {FITS}")
    return parameters[name]


def _refuse_odd_shards(name: str, parameter: Tensor, entries: Mapping[str, object]) -> None:
    """Refuse optimizer state that is sharded but does not have the shape of its parameter.

    A new optimizer takes the sharding of an entry from its parameter, so it could not tell which part of such an entry a rank holds.
    """
    for leaf in leaves(dict(entries)) if is_sharded_tensor(parameter) else ():
        if is_sharded_tensor(leaf) and isinstance(leaf, Tensor) and checked(name, leaf).shape != parameter.shape:
            raise UsageError(
                f"{name} has a sharded tensor of shape {tuple(leaf.shape)} for a parameter of shape {tuple(parameter.shape)}, "
                "which cannot be restored at another world size; use another optimizer, or do not shard the model"
            )
