"""Units of a whole model that is counted, as `fully_shard` would gather them if the model were sharded."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from undula.parallel.materialize import is_on_meta, own_layers, problem_of_meta
from undula.parallel.sharding import problem_of_sharding
from undula.parallel.spec import ShardingSpec
from undula.plan.memory import SplitTensor, UnitCount
from undula.state.pieces import is_sharded
from undula.train.dry_run.storages import storage_bytes


class CountedUnits:
    """Units of a module.

    With `sharding.gather=compute`, copies of the parameters in 16 bits take their places in counted passes, as gathered parameters do in
    those of a run, and inputs of the units are converted.

    Args:
        module: The module.
        units: Its units.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module]):
        self._parts = [module, *(unit for unit in units if unit is not module)]
        self._hooks = [
            part.register_forward_pre_hook(self._convert, prepend=True, with_kwargs=True) for part in self._parts
        ]
        self._hooks.append(module.register_forward_hook(self._convert_back))
        self._places = [
            (layer, name, parameter)
            for layer in module.modules()
            for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self._dtype: torch.dtype | None = None
        """Type in which units are gathered and to which their inputs are converted; None for that of the parameters."""
        self._copies: dict[torch.dtype, dict[nn.Parameter, nn.Parameter]] = {}
        """Copies of each type. The graph of an earlier loss can keep them in memory, so new ones would change what is alive."""
        self._computed: dict[nn.Parameter, None] = {}
        """Parameters whose copies have had a gradient."""

    @property
    def gathered_share(self) -> float:
        """Bytes of a gathered parameter, relative to its own."""
        return self._dtype.itemsize / torch.float32.itemsize if self._dtype else 1.0

    def remove(self) -> None:
        """Remove the hooks from the module."""
        for hook in self._hooks:
            hook.remove()

    def with_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> tuple[UnitCount, ...]:
        """Return the parameters of the units, those of the rest of the module first, with the state of their optimizer."""
        units = self._parts[1:]
        every = [
            dict.fromkeys(each for layer in own_layers(part, units) for each in layer.parameters(recurse=False))
            for part in self._parts
        ]
        return tuple(UnitCount(tuple(_split(each, state.get(each, {})) for each in own)) for own in every)

    def gather_in(self, dtype: torch.dtype | None) -> None:
        """Let the next passes gather units in a floating-point type; None for that of the parameters."""
        self._dtype = dtype
        if dtype and dtype not in self._copies:
            parameters = dict.fromkeys(parameter for *_, parameter in self._places)
            self._copies[dtype] = {
                each: nn.Parameter(each.detach().to(dtype), each.requires_grad) for each in parameters
            }

    def end_pass(self) -> None:
        """Put the parameters back in the places of their copies, and free the gradients of these."""
        if self._dtype:
            for layer, name, parameter in self._places:
                setattr(layer, name, parameter)
            for parameter, copy in self._copies[self._dtype].items():
                if copy.grad is not None:
                    self._computed[parameter], copy.grad = None, None

    def give_gradients(self) -> None:
        """Give each parameter a gradient of its own dtype, if its copy had one since the last call."""
        for parameter in self._computed:
            parameter.grad = torch.empty_like(parameter)
        self._computed.clear()

    def _convert(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._dtype is None:
            return None
        if part is self._parts[0] and torch.is_grad_enabled():
            copies = self._copies[self._dtype]
            for layer, name, parameter in self._places:
                setattr(layer, name, copies[parameter].requires_grad_(parameter.requires_grad))
        return tree_map(partial(_converted, dtype=self._dtype), (args, kwargs))

    def _convert_back(self, part: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(partial(_converted, dtype=torch.float32), output) if self._dtype else None


def uncounted_sharding(module: nn.Module, spec: ShardingSpec) -> str | None:
    """Return the reason why a model cannot be counted as a job's settings shard it, as a sentence; None if it can."""
    if is_sharded(module):
        return (
            "a model that the script shards with fully_shard() is not counted; leave the sharding to sharding.stage, or count it with "
            "neither"
        )
    if not spec.stage:
        return None
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if spec.gather == "compute" and dtypes != {torch.float32}:
        return (
            "sharding.gather=compute is counted only for models whose parameters all are float32; convert them, or count the job with "
            "sharding.gather=fp32"
        )
    if is_on_meta(module) and (problem := problem_of_meta(module)):
        return problem
    return problem_of_sharding(module, spec)


def _converted(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _split(parameter: nn.Parameter, state: Mapping[str, Any]) -> SplitTensor:
    rows = len(parameter)
    same = [each for each in state.values() if isinstance(each, Tensor) and each.shape == parameter.shape]
    return SplitTensor(rows, parameter.nbytes // rows, parameter.requires_grad, storage_bytes(same) // rows)
