"""Marks in the passes of a whole model, where `fully_shard` would gather and free its units if the model were sharded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from undula.parallel.materialize import is_on_meta, own_layers, problem_of_meta
from undula.parallel.sharding import problem_of_sharding
from undula.parallel.spec import ShardingSpec
from undula.plan.unit_pass import REST, Mark, MarkKind, SplitTensor, UnitCount
from undula.state.pieces import is_sharded
from undula.train.dry_run.gathered import GatheredCopies
from undula.train.dry_run.storages import LiveStorages, storage_bytes


class UnitMarks:
    """Marks of the units of a module.

    Args:
        module: The module.
        units: Its units.
        live: Counter of the storages.

    Attributes:
        in_backward: Whether the backward pass has begun.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], live: LiveStorages):
        self._live = live
        self._parts = [module, *(unit for unit in units if unit is not module)]
        self._hooks = [hook for number, part in enumerate(self._parts) for hook in self._hooked(number, part)]
        self.in_backward = False
        self._dtype: torch.dtype | None = None
        """Type in which units are gathered and to which their inputs are converted; None for that of the parameters."""
        self._copies: GatheredCopies | None = None
        self._made: dict[torch.dtype, GatheredCopies] = {}
        """Copies of each type. The graph of an earlier loss can keep them in memory, so new ones would change what is alive."""
        self._marks: list[tuple[int, MarkKind, bool, int, int]] = []
        """Unit, kind, whether the backward pass has begun, bytes alive, and the gradient of the unit."""
        self._peaks: list[int] = []
        """Most bytes alive before each mark, since the one before."""
        self._began: set[int] = set()
        self._ended: set[int] = set()

    @property
    def gathered_share(self) -> float:
        """Bytes of a gathered parameter, relative to its own."""
        return self._dtype.itemsize / torch.float32.itemsize if self._dtype else 1.0

    def remove(self) -> None:
        """Remove the hooks from the module."""
        for hook in self._hooks:
            hook.remove()

    def units_with(self, state: Mapping[Tensor, Mapping[str, Any]]) -> tuple[UnitCount, ...]:
        """Return the parameters of the units, those of the rest of the module first, with the state of their optimizer."""
        every = [dict.fromkeys(self._own(unit)) for unit in range(len(self._parts))]
        return tuple(UnitCount(tuple(_split(each, state.get(each, {})) for each in own)) for own in every)

    def gather_in(self, dtype: torch.dtype | None) -> None:
        """Let the next passes gather units in a floating-point type; None for that of the parameters."""
        if dtype and dtype not in self._made:
            self._made[dtype] = GatheredCopies(self._parts[REST], dtype)
        self._dtype, self._copies = dtype, self._made[dtype] if dtype else None

    def give_gradients(self) -> None:
        """Give the parameters gradients, if their gathered copies had some instead."""
        if self._copies:
            self._copies.give_gradients()

    def begin(self) -> None:
        """Begin a pass."""
        self.in_backward = False
        for found in (self._marks, self._peaks, self._began, self._ended):
            found.clear()

    def end(self) -> tuple[Mark, ...]:
        """End a pass, as `fully_shard` does with units of whose backward pass torch did not see the end, and return the marks."""
        for unit in range(len(self._parts)):
            if unit in self._began and unit not in self._ended:
                self._mark(unit, "backward end")
        peaks, before = [*self._peaks[1:], self._live.part_peak], self._live.before
        marks, freed = [], 0
        for (unit, kind, is_backward, held, gradient), most in zip(self._marks, peaks, strict=True):
            now, freed = freed, freed + gradient
            marks.append(Mark(unit, kind, is_backward, held - before - now, most - before - freed, gradient))
        if self._copies:
            self._copies.put_back()
        return tuple(marks)

    def _mark(self, unit: int, kind: MarkKind) -> None:
        live, gradient = self._live, 0
        live.begin_if_due()
        if kind == "backward end":
            gradient = storage_bytes([each.grad for each in self._own(unit) if each.grad is not None])
            self._ended.add(unit)
        self._peaks.append(live.part_peak)
        self._marks.append((unit, kind, self.in_backward, live.bytes, gradient))
        live.part_peak = live.bytes

    def _own(self, unit: int) -> Iterator[nn.Parameter]:
        units = [part for number, part in enumerate(self._parts) if number != REST]
        for layer in own_layers(self._parts[unit], units):
            yield from layer.parameters(recurse=False)

    def _hooked(self, number: int, part: nn.Module) -> Iterator[Any]:
        yield part.register_forward_pre_hook(partial(self._before_forward, number), prepend=True, with_kwargs=True)
        yield part.register_forward_hook(partial(self._after_forward, number))

    def _before_forward(self, unit: int, part: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        leaves = [_converted(leaf, self._dtype) for leaf in leaves]
        self._mark(unit, "forward")
        places = []
        if torch.is_grad_enabled() and not self.in_backward:
            self._began.add(unit)
            if self._copies and unit == REST:
                self._copies.put_in()
            places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not places:
            return tree_unflatten(leaves, structure) if self._dtype else None
        passed = _Passed.apply(partial(self._mark, unit, "backward end"), *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, passed, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, structure)

    def _after_forward(self, unit: int, part: nn.Module, args: Any, output: Any) -> Any:
        self._mark(unit, "forward end")
        if not self.in_backward and torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._mark(unit, "backward"))  # type: ignore[no-untyped-call]
        if unit == REST and self._dtype:
            return tree_map(lambda leaf: _converted(leaf, torch.float32), output)
        return None


class _Passed(torch.autograd.Function):
    """Passes the inputs of a unit on, and calls a function when the backward pass has come to all of their gradients."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *gradients


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


def _converted(leaf: Any, dtype: torch.dtype | None) -> Any:
    return leaf.to(dtype) if dtype and isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _split(parameter: nn.Parameter, state: Mapping[str, Any]) -> SplitTensor:
    rows = len(parameter)
    same = [each for each in state.values() if isinstance(each, Tensor) and each.shape == parameter.shape]
    return SplitTensor(rows, parameter.nbytes // rows, parameter.requires_grad, storage_bytes(same) // rows)
