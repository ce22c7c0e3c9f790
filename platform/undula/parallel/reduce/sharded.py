"""Collectives of a sharded model: units are gathered in one order on all ranks, and gradients are added up along the tree of the plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from undula.errors import UsageError
from undula.parallel.layout import Layout
from undula.parallel.reduce.accumulator import Accumulator, ShowGradient
from undula.parallel.reduce.unit import Unit, flat_gradient, places_of, stays_gathered
from undula.parallel.reduce.unit_order import Collective, Pass, UnitOrder
from undula.parallel.reduce.unit_sum import InterleavedUnitSum, UnitSum
from undula.plan.plan import MicroBatch
from undula.state.pieces import shard_with

PROBLEM_OF_SHARDS = (
    "the loss of a batch is computed from shards of parameters, whose gradients torch's fully_shard does not reduce; compute such a term "
    "in forward() of the module that has the parameters, give the optimizer a weight_decay, or set sharding.stage=0"
)

PROBLEM_OF_METHODS = (
    "a unit of the sharded model was only run by a method other than forward(), for example one of register_fsdp_forward_method(), so that "
    "it is not known which of its parameters have a gradient; call the module itself in the batch, or set sharding.stage=0"
)


class ShardedAccumulator(Accumulator):
    """Accumulator of a sharded model. After `finish`, each rank has its shard of the gradient of each parameter.

    Args:
        module: Module that `fully_shard` has sharded, with its parameters in shards.
        layout: Layout of the worker group.
        virtual_workers: Number of virtual workers of the plan.
        sent_as: Dtype to which each sum is rounded, and in which gradients are sent; None for their own dtype.
        offloads: Whether the shards are in host memory, and what is gathered of them on the device of the layout.
        frees_once: Whether units stay gathered until the last backward pass of a step.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        virtual_workers: int,
        sent_as: torch.dtype | None = None,
        offloads: bool = False,
        frees_once: bool = False,
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
        parts = [(name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule)]
        stays = [place == 0 or stays_gathered(part) for place, (_, part) in enumerate(parts)]
        trainable = [places_of(part) for _, part in parts]
        self.order = UnitOrder([*map(bool, trainable)], stays, self._join_in, layout.control)
        """Order of the ranks' collectives."""
        make_sum = partial(
            InterleavedUnitSum if layout.interleaves and layout.num_cells > 1 else UnitSum,
            layout,
            virtual_workers,
            sent_as=sent_as,
            offloads=offloads,
        )
        self._units = [
            Unit(
                name or "the model",
                part,
                places,
                stay,
                make_sum(flat=flat_gradient(part, places, layout)),
                partial(self.order.reach, Collective("gather", number)),
                self.collectives,
            )
            for number, ((name, part), places, stay) in enumerate(zip(parts, trainable, stays, strict=True))
        ]
        self._stays, self._frees_once = all(stays), frees_once
        self._is_gathered = False
        """Whether all units are gathered on all ranks."""
        self._hooks: list[RemovableHandle] = [
            parameter.register_hook(self._present_pass.refuse)  # type: ignore[no-untyped-call]
            for parameter in self.parameters
        ]
        self._whole: dict[Tensor, tuple[nn.Parameter, tuple[int, int]]] = {}
        """Sharded parameter of each whole one, and the memory of the whole one with the number of changes that torch has counted of it."""
        for number, unit in enumerate(self._units):
            FSDPModule.set_custom_reduce_scatter(unit.module, unit.sum)  # type: ignore[arg-type]
            if layout.num_cells == 1:
                FSDPModule.set_all_reduce_hook(unit.module, unit.sum.take_alone)
            else:
                FSDPModule.set_custom_all_gather(unit.module, unit)  # type: ignore[arg-type]
            if isinstance(unit.sum, InterleavedUnitSum):
                unit.sum.order, unit.sum.number, unit.sum.collectives = self.order, number, self.collectives
                unit.sum.has_gradient = partial(self._has_gradient, unit)
            assert isinstance(unit.module, nn.Module)
            self._hooks.append(unit.module.register_forward_pre_hook(partial(self._before_forward, number)))
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

    def begin_evaluation(self) -> None:
        """Begin forward passes that no backward pass follows. All ranks must call this, and then `end_forward`."""
        if self._layout.num_cells > 1 and not self._is_gathered:
            self.order.begin("evaluation")

    def end_forward(self, then: Pass | None = None) -> None:
        """End forward passes, in which each rank may have used other units. `then` is the kind of backward pass that follows."""
        if self.order.is_open:
            with self.collectives.counted():
                self.order.end(then)
            self._is_gathered = self._stays

    def before_forward(self) -> None:
        for unit in self._units:
            unit.sum.forward_passes = 0
        is_sending = self._layout.interleaves and self._passes[0][1]
        if self._layout.num_cells > 1 and (is_sending or not self._is_gathered):
            self.order.begin("forward", self._is_gathered)

    def before_backward(self, micro_batch: MicroBatch, is_last: bool) -> None:
        place, is_last_of_place = self._passes.pop(0)
        kind = _pass_of(self._layout.interleaves and is_last_of_place, is_last)
        self.end_forward(kind)
        self._end_leaves(place)
        self._counts, self._present_pass.is_open = micro_batch.samples > 0, True
        self._computed_now.clear()
        self._free()
        for unit in self._units:
            unit.sum.begin_pass(self._counts, is_last_of_place)
        if self._layout.num_cells > 1 and (kind != "backward" or not self._frees_once):
            self.order.begin(kind)

    def after_backward(self) -> None:
        """Replace the gradients that torch has left, which count for nothing. A change by the script of those in their place is noticed."""
        if self.order.is_open:
            with self.collectives.counted():
                self.order.end()
                self._send_late()
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
            if _state_of(whole) != version:
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

    def reshard(self) -> None:
        """Free all gathered parameters. All ranks must call this."""
        self._is_gathered = False
        for unit in self._units:
            FSDPModule.reshard(unit.module)

    def finish(self, samples: int) -> None:
        self._end_leaves(max(map(len, self._shares)))
        self._free()
        present, watched = self._present_anywhere()
        for unit, is_watched in zip(self._units, watched, strict=True):
            if not unit.places:
                continue
            total = unit.sum.total()
            if not is_watched and bool(total.any()):
                raise UsageError(PROBLEM_OF_METHODS)
            total = total.to(unit.places[0][2].dtype)  # that of all parameters of the unit
            for _, _, parameter in unit.places:
                if parameter in present:
                    parameter.grad = shard_with(unit.views[parameter](total), parameter)

    def _join_in(self, collective: Collective) -> None:
        """Take part in a collective that the batch of this rank does not need now."""
        unit = self._units[collective.unit]
        if collective.kind == "send":
            self._send(unit)
            return
        begun = unit.num_gathered
        unit.module.unshard()
        if unit.num_gathered == begun:  # it is gathered here, but not on the rank that needs it
            FSDPModule.reshard(unit.module)
            unit.module.unshard()
        elif not unit.stays or self._present_pass.is_open:
            FSDPModule.reshard(unit.module)

    def _send(self, unit: Unit) -> None:
        """Send the gradient of a unit outside of its own backward pass, on the stream of all other gradients."""
        assert isinstance(unit.sum, InterleavedUnitSum)
        if self._layout.device.type != "cuda":
            unit.sum.send()
            return
        here = torch.cuda.current_stream(self._layout.device)
        stream = unit.sum.stream or here
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            unit.sum.send()
        for waiting in (here, torch.cuda.default_stream(self._layout.device)):
            waiting.wait_stream(stream)

    def _send_late(self) -> None:
        for number in sorted(self.order.late):
            unit = self._units[number]
            assert isinstance(unit.sum, InterleavedUnitSum)
            if unit.sum.is_folded:
                raise UsageError(
                    f"a backward pass came to {unit.name} of the sharded model after its gradient had been sent, and earlier in other "
                    "batches that ran the same units; set sharding.stage=1"
                )
            self._send(unit)

    def _has_gradient(self, unit: Unit) -> bool:
        return any(parameter in self._computed_now for _, _, parameter in unit.places)

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

    def _before_forward(self, number: int, *_: object) -> None:
        """Count the forward passes of a unit, and let its whole parameters tell when they get a gradient. Torch makes zeros for others."""
        unit = self._units[number]
        self.order.call(number)
        # Torch calls no hooks for other methods that are registered as forward passes (`register_fsdp_forward_method`).
        has_others = any(isinstance(each, MethodType) and name != "forward" for name, each in vars(unit.module).items())
        unit.is_watched = True
        is_recomputation = self._present_pass.is_open
        # A pass without gradients has a backward pass if the unit is recomputed there, and otherwise none.
        if has_others or (not torch.is_grad_enabled() and not is_recomputation):
            unit.sum.forward_passes = None
        elif not is_recomputation and unit.sum.forward_passes is not None:
            unit.sum.forward_passes += 1
        for layer, name, parameter in unit.places:
            whole = layer._parameters[name]
            if whole is None or whole is parameter or whole in self._whole:
                continue
            if whole.requires_grad:
                self._whole[whole] = parameter, _state_of(whole)
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

    def _present_anywhere(self) -> tuple[set[nn.Parameter], list[bool]]:
        """Return the parameters of which any rank has a gradient, and whether a forward pass has come to each unit on any rank."""
        own = [parameter in self._present for parameter in self.parameters] + [unit.is_watched for unit in self._units]
        flags = torch.tensor(own, dtype=torch.uint8, device="cpu")
        if self._layout.num_cells > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._layout.control)
        count = len(self.parameters)
        present, watched = flags[:count].tolist(), flags[count:].tolist()
        return {parameter for parameter, flag in zip(self.parameters, present, strict=True) if flag}, watched


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


def _pass_of(is_sending: bool, is_last: bool) -> Pass:
    if is_sending:
        return "last sending" if is_last else "sending"
    return "last backward" if is_last else "backward"


def _state_of(whole: Tensor) -> tuple[int, int]:
    """Return the memory of a tensor, which an assignment to `data` replaces, and the number of changes that torch has counted of it."""
    return whole.untyped_storage()._cdata, whole._version
