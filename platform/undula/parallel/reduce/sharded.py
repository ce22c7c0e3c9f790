"""Gradients of a sharded model. Torch's `fully_shard` concatenates them by unit, and they are added up here, along the tree of the plan."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from undula.errors import UsageError
from undula.parallel.gradient_hooks import ShowGradient
from undula.parallel.layout import Layout
from undula.parallel.reduce.accumulator import Accumulator
from undula.parallel.reduce.unit_sum import InterleavedUnitSum, UnitSum
from undula.plan.plan import MicroBatch
from undula.state.pieces import shard_with

Place = tuple[nn.Module, str, nn.Parameter]
"""Layer, name in the layer, and sharded parameter, in whose place the layer has a whole one while it is gathered."""
PROBLEM_OF_SHARDS = (
    "the loss of a batch is computed from shards of parameters, whose gradients torch's fully_shard does not reduce; compute such a term "
    "in forward() of the module that has the parameters, give the optimizer a weight_decay, or set sharding.stage=0"
)

PROBLEM_OF_METHODS = (
    "a unit of the sharded model was only run by a method other than forward(), for example one of register_fsdp_forward_method(), so that "
    "it is not known which of its parameters have a gradient; call the module itself in the batch, or set sharding.stage=0"
)


@dataclass
class Unit:
    """Module that `fully_shard` gathers at once, and the sum of its gradients."""

    module: FSDPModule
    places: Sequence[Place]
    """Parameters of the unit that require a gradient."""
    sum: UnitSum
    views: dict[nn.Parameter, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """Functions that return the gradient of a parameter's shard as a view of a slice of the flat gradient."""
    is_watched: bool = False
    """Whether a forward pass has shown which parameters are gathered. Only then is it known which of them get a gradient."""

    def find_views(self) -> None:
        """Find out, after a backward pass, where torch has the gradient of each parameter in the slice."""
        if len(self.views) < len(self.places):
            for _, _, parameter in self.places:
                if isinstance(parameter.grad, DTensor):
                    shard = parameter.grad.to_local()
                    place = (shard.shape, shard.stride(), int(shard.storage_offset()))
                    self.views[parameter] = partial(_view, place=place)


class ShardedAccumulator(Accumulator):
    """Accumulator of a sharded model. After `finish`, each rank has its shard of the gradient of each parameter.

    Args:
        module: Module that `fully_shard` has sharded, with its parameters in shards.
        layout: Layout of the worker group.
        virtual_workers: Number of virtual workers of the plan.
        sent_as: Dtype to which each sum is rounded, and in which gradients are sent; None for their own dtype.
        offloads: Whether the shards are in host memory, and what is gathered of them on the device of the layout.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        virtual_workers: int,
        sent_as: torch.dtype | None = None,
        offloads: bool = False,
    ):
        super().__init__(module)
        self.show: ShowGradient | None = None
        """Function that gets each gradient of a micro-batch, before it is reduced; None for none."""
        self._layout = layout
        self._shares = layout.assignment(virtual_workers)
        self._present: set[nn.Parameter] = set()
        """Parameters of which a micro-batch with samples has computed a gradient on this rank."""
        self._computed_now: set[nn.Parameter] = set()
        """Those of which the present backward pass has computed a gradient."""
        self._counts = False
        self._present_pass = _Pass()
        self._all = list(module.parameters())
        """All sharded parameters. Torch can set zeros as the gradient also of one that no longer requires a gradient."""
        make = InterleavedUnitSum if layout.interleaves and layout.num_cells > 1 else UnitSum
        self._units = [
            Unit(part, places, make(layout, virtual_workers, sent_as, offloads)) for part, places in _units_of(module)
        ]
        self._hooks: list[RemovableHandle] = [
            parameter.register_hook(self._present_pass.refuse)  # type: ignore[no-untyped-call]
            for parameter in self.parameters
        ]
        self._whole: dict[Tensor, tuple[nn.Parameter, int]] = {}
        """Sharded parameter of each whole one, and the number of changes that torch has counted of the whole one."""
        for unit in self._units:
            unit.module.set_custom_reduce_scatter(unit.sum)  # type: ignore[arg-type]
            if layout.num_cells == 1:
                unit.module.set_all_reduce_hook(unit.sum.take_alone)
            assert isinstance(unit.module, nn.Module)
            self._hooks.append(unit.module.register_forward_pre_hook(partial(self._before_forward, unit)))
        self.open([])

    def close(self) -> None:
        """Remove the hooks from the parameters and modules."""
        for hook in self._hooks:
            hook.remove()
        self._whole.clear()

    def open(self, work: Sequence[MicroBatch]) -> None:
        self._require_unchanged()
        self._present.clear()
        places = [self._place(micro_batch) for micro_batch in work]
        self._passes = [(place, place != then) for place, then in zip(places, [*places[1:], None], strict=False)]
        """Place of the virtual worker of each backward pass that is to come, and whether the pass is its last one."""
        self._num_ended = 0
        """Number of this rank's virtual workers whose leaves are ended."""
        for unit in self._units:
            unit.sum.begin_step()

    def before_backward(self, micro_batch: MicroBatch, is_last: bool) -> None:
        place, is_last_of_place = self._passes.pop(0)
        self._end_leaves(place)
        self._counts, self._present_pass.is_open = micro_batch.samples > 0, True
        self._computed_now.clear()
        self._free()
        for unit in self._units:
            unit.sum.begin_pass(self._counts, is_last_of_place)

    def after_backward(self) -> None:
        """Replace the gradients that torch has left, which count for nothing. A change by the script of those in their place is noticed."""
        self._counts = self._present_pass.is_open = False
        self._require_unchanged()
        for unit in self._units:
            unit.sum.end_pass()
            unit.find_views()
        self._free()
        for whole, (parameter, _) in self._whole.items():
            for each in (whole, parameter):
                zero = torch.zeros((), dtype=each.dtype, device=each.device)
                each.grad = zero.expand(each.shape)

    def _free(self) -> None:
        for each in (*self._all, *self._whole):
            each.grad = None

    def _require_unchanged(self) -> None:
        """Refuse changes of whole parameters, which are lost when these are freed.

        Raises:
            UsageError: The script has changed one.
        """
        for whole, (parameter, version) in self._whole.items():
            if whole._version != version:
                names = {
                    place: f"{type(layer).__name__.removeprefix('FSDP')}.{name}"
                    for unit in self._units
                    for layer, name, place in unit.places
                }
                raise UsageError(
                    f"the script, or the forward pass, changed the parameter {names[parameter]} while it was gathered, where changes of a "
                    "sharded model are lost; change it after step.update(), and run forward passes of the script's own under "
                    "torch.no_grad(), or set sharding.stage=0"
                )

    def finish(self, samples: int) -> None:
        self._end_leaves(max(map(len, self._shares)))
        self._free()
        present = self._present_anywhere()
        for unit in self._units:
            total = unit.sum.total()
            if total is not None and not unit.is_watched and bool(total.any()):
                raise UsageError(PROBLEM_OF_METHODS)
            for _, _, parameter in unit.places:
                if total is not None and parameter in present:
                    total = total.to(parameter.dtype)  # that of all parameters of the unit
                    parameter.grad = shard_with(unit.views[parameter](total), parameter)

    def _place(self, micro_batch: MicroBatch) -> int:
        """Return the place of a micro-batch's virtual worker among those of its rank."""
        return next(
            share.index(micro_batch.virtual_worker) for share in self._shares if micro_batch.virtual_worker in share
        )

    def _end_leaves(self, stop: int) -> None:
        for place in range(self._num_ended, stop):
            for unit in self._units:
                unit.sum.end_leaves(place)
        self._num_ended = stop

    def _before_forward(self, unit: Unit, *_: object) -> None:
        """Count the forward passes of a unit, and let its whole parameters tell when they get a gradient. Torch makes zeros for others."""
        # Torch calls no hooks for other methods that are registered as forward passes (`register_fsdp_forward_method`).
        has_others = any(isinstance(each, MethodType) and name != "forward" for name, each in vars(unit.module).items())
        unit.is_watched = True
        if torch.is_grad_enabled() and not self._present_pass.is_open and not has_others:
            unit.sum.forward_passes += 1
        for layer, name, parameter in unit.places:
            whole = layer._parameters[name]
            if whole is None or whole is parameter or whole in self._whole:
                continue
            if whole.requires_grad:
                self._whole[whole] = parameter, whole._version
                computed = partial(self._computed, parameter)
                self._hooks.append(whole.register_post_accumulate_grad_hook(computed))  # type: ignore[no-untyped-call]

    def _computed(self, parameter: nn.Parameter, whole: Tensor) -> None:
        if parameter in self._computed_now:
            raise UsageError(
                "a backward pass computed the gradient of a layer of a sharded model in several parts, which torch's fully_shard adds up "
                "wrongly; if the model uses activation checkpointing, set use_reentrant=False"
            )
        self._computed_now.add(parameter)
        if self._counts:
            self._present.add(parameter)
            if self.show:
                assert whole.grad is not None
                self.show(parameter, whole.grad)

    def _present_anywhere(self) -> set[nn.Parameter]:
        """Return the parameters of which any rank has a gradient."""
        if self._layout.num_cells == 1:
            return self._present
        own = [parameter in self._present for parameter in self.parameters]
        flags = torch.tensor(own, dtype=torch.uint8, device="cpu")
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._layout.control)
        return {parameter for parameter, flag in zip(self.parameters, flags.tolist(), strict=True) if flag}


@dataclass
class _Pass:
    """State of a backward pass that hooks of parameters need. It does not refer to the parameters, which could then stay in memory."""

    is_open: bool = False
    """Whether `step.backward()` runs it."""

    def refuse(self, gradient: Tensor) -> None:
        """Refuse a gradient of a shard itself, which would be lost beside that of the whole parameter.

        Raises:
            UsageError: The loss of a batch has such a gradient.
        """
        if self.is_open:
            raise UsageError(PROBLEM_OF_SHARDS)


def _units_of(module: nn.Module) -> Iterator[tuple[FSDPModule, list[Place]]]:
    """Yield each sharded module with its own trainable parameters, without those of sharded modules inside it."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            assert isinstance(part, nn.Module)
            yield (
                part,
                [
                    (layer, name, parameter)
                    for layer in _own_layers(part)
                    for name, parameter in layer._parameters.items()
                    if parameter is not None and parameter.requires_grad
                ],
            )


def _own_layers(part: nn.Module) -> Iterator[nn.Module]:
    yield part
    for child in part.children():
        if not isinstance(child, FSDPModule):
            yield from _own_layers(child)


def _view(flat: Tensor, place: tuple[Sequence[int], Sequence[int], int]) -> Tensor:
    return flat.as_strided(*place)
