"""Models and optimizers that can be sharded with the results of unsharded ones."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from undula.errors import UsageError
from undula.parallel.spec import ShardingSpec
from undula.parallel.units import problem_of_units, units_of
from undula.state.optimizer_state import state_like
from undula.state.pieces import copy_overlap, is_sharded_tensor, piece_of, spec_of

_COMPARED = {SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, RAdam, Adamax, Adadelta, ASGD}
"""Optimizers of torch whose results on shards are those on whole parameters, as tests show."""
_OTHER_BITS_IN_LISTS = {NAdam, RAdam, ASGD}
"""Optimizers whose results with foreach=True, which processes lists of tensors, are others than without."""
_OWN = ("undula.optim.lamb.Lamb", "undula.optim.lars.LARS")


@runtime_checkable
class Settles(Protocol):
    """Optimizer that needs the other ranks in a step, such as LARS and LAMB, whose import would be slow, and can do so before it."""

    settled: list[Tensor] | None
    """What `settle` has computed for the next step; None if the step is to compute it."""

    def settle(self) -> None:
        """Compute what the next step needs of other ranks. All ranks must call this."""


def problem_of_sharding(module: nn.Module, spec: ShardingSpec) -> str | None:
    """Return the reason why `fully_shard` cannot shard a module as a job's settings say, as a sentence; None if it can."""
    key = f"sharding.stage={spec.stage}"
    if spec.units != "auto" and (problem := problem_of_units(module, spec.units, "sharding.units")):
        return problem
    units = units_of(module, spec.units)
    for name, part in {**units, "": module}.items():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            return (
                f"{key} cannot shard {name or 'the model'}, a {type(part).__name__}, which has no forward pass in which its parameters "
                "could be gathered; make it a module that calls its parts in forward(), or set sharding.stage=0"
            )
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            return f"{key} cannot shard the parameter {name!r}, which has no dimension; give it the shape [1], or set sharding.stage=0"
        if not parameter.numel():
            return (
                f"{key} cannot shard the parameter {name!r}, which has no elements; remove it, or set sharding.stage=0"
            )
        if parameter.requires_grad and (parameter.is_complex() or parameter.dtype == torch.float64):
            return (
                f"{key} cannot shard the parameter {name!r}, whose dtype {_text(parameter.dtype)} has other results in shards; convert it "
                "to float32, or set sharding.stage=0"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"{key} replaces the parameter {name!r}, whose hook would be lost; remove the hook, or set sharding.stage=0"
        if not parameter.is_contiguous():
            return (
                f"{key} cannot shard the parameter {name!r}, whose memory is not contiguous, as after model.to(memory_format="
                "torch.channels_last); remove that call, or set sharding.stage=0"
            )
    if problem := _problem_of_shared_memory(module, key):
        return problem
    return _problem_of_shared_weights(module, units, key) or problem_of_dtypes(module, units, key)


def _problem_of_shared_memory(module: nn.Module, key: str) -> str | None:
    first: dict[tuple[int, Any], str] = {}
    for name, parameter in module.named_parameters():
        storage = parameter.untyped_storage()._cdata  # a fake tensor has one, too, but no pointer to its data
        other = first.setdefault((storage, parameter.storage_offset()), name)
        if other != name:
            return (
                f"{key} cannot shard the parameters {other!r} and {name!r}, which share memory, as after `data = other.data`; make both "
                "one parameter, or set sharding.stage=0"
            )
    return None


def _problem_of_shared_weights(module: nn.Module, units: Mapping[str, nn.Module], key: str) -> str | None:
    owners: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = _unit_of(name, units)
        if owners.setdefault(parameter, unit) != unit:
            others = [each or "the rest of the model" for each in (owners[parameter], unit)]
            return (
                f"{key} cannot shard the weight {name!r}, which {others[0]} and {others[1]} share; name units in sharding.units that "
                "do not share weights, or set sharding.stage=0"
            )
    return None


def problem_of_dtypes(module: nn.Module, units: Mapping[str, nn.Module], key: str) -> str | None:
    """Return the reason why units have trainable parameters of several dtypes, as a sentence that begins with `key`; None if none has."""
    dtypes: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            unit = _unit_of(name, units)
            first, dtype = dtypes.setdefault(unit, (name, parameter.dtype))
            if dtype != parameter.dtype:
                return (
                    f"{key} cannot shard {unit or 'the part of the model outside of units'}, whose parameters {first!r} and {name!r} have "
                    f"the dtypes {_text(dtype)} and {_text(parameter.dtype)}; give both one dtype, or set sharding.stage=0"
                )
    return None


def _unit_of(parameter: str, units: Mapping[str, nn.Module]) -> str:
    """Return the name of the unit of a parameter; empty for the rest of the model."""
    return next((unit for unit in units if parameter.startswith(f"{unit}.")), "")


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def set_up_optimizer(
    optimizer: Optimizer, parameters: list[nn.Parameter], device: torch.device, is_chosen: bool
) -> bool:
    """Check an optimizer of a sharded model, and let it compute as that of an unsharded model does.

    Args:
        optimizer: The optimizer.
        parameters: Sharded parameters of the model.
        device: Device of the shards.
        is_chosen: Whether the job's settings have sharded the model, and not the script.

    Returns:
        Whether its results on shards are those on whole parameters, as far as is known.

    Raises:
        UsageError: The optimizer has other parameters, or the job's settings shard the model and its results may be others.
    """
    known = set(parameters)
    if any(parameter not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            "run.optimizer() got an optimizer of parameters that the sharded model does not have, because run.model() has replaced them; "
            "make the optimizer from the parameters of the model that run.model() returns"
        )
    if is_chosen and (problem := problem_of_optimizer(optimizer)):
        raise UsageError(problem)
    if not _is_compared(optimizer):
        return False
    for group in optimizer.param_groups:
        # For whole parameters on a GPU, torch chooses lists by itself, and for shards never.
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = device.type != "cpu" or type(optimizer) not in _OTHER_BITS_IN_LISTS
    return has_known_results(optimizer)


def problem_of_optimizer(optimizer: Optimizer) -> str | None:
    """Return the reason why the results of an optimizer on shards can be others than on whole parameters, as a sentence; None for none."""
    kind = type(optimizer).__name__
    if not _is_compared(optimizer):
        names = ", ".join(sorted(each.__name__ for each in _COMPARED))
        return (
            f"sharding.stage cannot be combined with the optimizer {kind}, whose results on shards were not compared with those on whole "
            f"parameters; use {names}, or LAMB or LARS of undula.optim, or set sharding.stage=0"
        )
    if any(group.get("fused") for group in optimizer.param_groups):
        return (
            f"sharding.stage cannot be combined with {kind}(fused=True), whose results on shards are others than those on whole "
            "parameters; remove fused=True, or set TrainingArguments.optim='adamw_torch' if it is the default of Hugging Face's Trainer"
        )
    return None


def has_known_results(optimizer: Optimizer) -> bool:
    """Return whether the results of an optimizer on shards are those on whole parameters, as far as is known."""
    return problem_of_optimizer(optimizer) is None


def has_own_step(optimizer: Optimizer) -> bool:
    """Return whether the script has given an optimizer, or all of them, hooks, or the optimizer a step of its own."""
    step = vars(optimizer).get("step", optimizer.step)
    if getattr(step, "_wrapped_by_lr_sched", False):  # schedulers of torch count the steps of an optimizer
        step = step.__wrapped__
    hooks = [
        *(*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()),
        *(*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()),
    ]
    is_own = getattr(step, "__func__", step) is not type(optimizer).step
    return is_own or any(not str(getattr(hook, "__module__", "")).startswith("undula.") for hook in hooks)


def place_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Shard gradients that the script has replaced as their parameters are. All ranks must call this."""
    for parameter in parameters:
        gradient: Any = parameter.grad
        if is_sharded_tensor(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def follow(optimizer: Optimizer, former: Mapping[nn.Parameter, str], now: Mapping[str, nn.Parameter]) -> None:
    """Give an optimizer the parameters that have taken the place of others, or have moved, and the state that it has made for those.

    Args:
        optimizer: The optimizer.
        former: Names of the parameters that the model had before.
        now: Parameters that it has now, by name. They may be shards of the former ones.
    """
    for group in optimizer.param_groups:
        group["params"] = [now[former[each]] if each in former else each for each in group["params"]]
    for owner in [each for each in optimizer.state if isinstance(each, nn.Parameter) and each in former]:
        parameter, entries = now[former[owner]], optimizer.state.pop(owner)
        optimizer.state[parameter] = {key: _placed(optimizer, parameter, key, entries[key]) for key in entries}


def _placed(optimizer: Optimizer, parameter: nn.Parameter, key: str, value: Any) -> Any:
    """Return an entry of the state of a whole parameter as the one of the parameter in its place."""
    if not isinstance(value, Tensor):
        return value
    whole = piece_of(value)
    placed = state_like(optimizer, parameter, key, spec_of(whole))
    copy_overlap(whole.box, whole.tensor, piece_of(placed))
    return placed


def _is_compared(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind in _COMPARED or f"{kind.__module__}.{kind.__name__}" in _OWN
