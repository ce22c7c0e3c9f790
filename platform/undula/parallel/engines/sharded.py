"""Engine of models that torch's `fully_shard` has sharded. It is imported only for such a model, because the import is slow."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from undula.errors import UsageError
from undula.parallel.capabilities import SHARDED
from undula.parallel.collectives import broadcast_from_rank_0, meet
from undula.parallel.engines.engine import Engine
from undula.parallel.fsdp_methods import free_methods, guard_methods
from undula.parallel.layout import Layout
from undula.parallel.local_step import on_local_parts
from undula.parallel.materialize import is_on_meta, materialize, own_layers, problem_of_meta
from undula.parallel.precision import dtype_of
from undula.parallel.reduce.accumulator import ShowGradient
from undula.parallel.reduce.sharded import PROBLEM_OF_SHARDS, ShardedAccumulator
from undula.parallel.sharded_tensors import adapt_sharded_tensors, changed_shards, watch_changes
from undula.parallel.sharding import (
    Settles,
    has_known_results,
    has_own_step,
    place_gradients,
    problem_of_dtypes,
    problem_of_sharding,
    set_up_optimizer,
)
from undula.parallel.spec import EngineSettings
from undula.parallel.units import units_of
from undula.plan.plan import MicroBatch
from undula.state.pieces import is_sharded, is_sharded_tensor
from undula.state.values import leaves


class ShardedEngine(Engine):
    """Engine of a module that gathers its parameters itself. The accumulator sums what the module would reduce.

    Args:
        layout: Layout of the worker group.
        settings: Settings of the job.
        sent_as: Dtype to which each sum of gradients is rounded, and in which gradients are sent; None for their own dtype.
    """

    capabilities = SHARDED

    def __init__(self, layout: Layout, settings: EngineSettings, sent_as: torch.dtype | None = None):
        accumulate = partial(ShardedAccumulator, layout=layout, virtual_workers=settings.virtual_workers)
        self._sharding = settings.sharding
        self._frees_once = 0 < self._sharding.stage < 3
        offloads = self._sharding.offload == "all"
        super().__init__(layout, partial(accumulate, sent_as=sent_as, offloads=offloads, frees_once=self._frees_once))
        self._compute = dtype_of(settings.compute)
        self._former: dict[str, weakref.ref[nn.Parameter]] = {}
        """Parameters that the shards have replaced, by name."""
        self._is_in_batch = self._is_own_forward = self._has_run = False
        """Whether a batch is open, whose forward passes end with its backward pass, and whether the present one is outside of a batch,
        and whether the model has run."""

    def place(self, module: nn.Module) -> nn.Module:
        """Shard a module whose weights are those of rank 0, or accept a module that the script has sharded.

        Raises:
            UsageError: The module cannot be sharded, or is not sharded as a run needs it.
        """
        if is_sharded(module):
            self._check_sharded(module)
        elif is_on_meta(module):
            if problem := problem_of_meta(module):
                raise UsageError(problem)
            self._shard(module)
        else:
            self._former = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
            self._shard(module)
        for part in _parts(module):
            part.set_gradient_divide_factor(1.0)  # losses are weighted already, so gradients are summed
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale a sum
            # Otherwise the places of gradients in the flat one would depend on which parameters a micro-batch uses.
            part.set_reduce_scatter_unused_params(True)
            # Torch derives a class named FSDP..., and transformers chooses losses, among others, by the name of a model's class.
            type(part).__name__ = type(part).__mro__[2].__name__
        adapt_sharded_tensors()
        guard_methods(_parts(module), lambda: self._is_in_batch)
        self._hooks = [
            module.register_forward_pre_hook(self._before_own_forward, prepend=True),
            module.register_forward_hook(self._after_own_forward, always_call=True),
        ]
        self._attach(module)
        return module

    @property
    def _sharded(self) -> ShardedAccumulator:
        assert isinstance(self._accumulator, ShardedAccumulator)
        return self._accumulator

    def _before_own_forward(self, *_: object) -> None:
        """Begin a forward pass of the script outside of a batch."""
        self._has_run = True
        self._is_own_forward = not self._is_in_batch
        if self._is_own_forward:
            meet(self.layout.shards)
            self._sharded.begin_evaluation()

    def _after_own_forward(self, _: nn.Module, inputs: object, output: object) -> None:
        """Free what a forward pass without gradients has gathered, as when a script generates samples, unless more follow at once."""
        if not self._is_own_forward or output is None:  # it has failed
            return
        self._sharded.end_forward()
        if not torch.is_grad_enabled() and not self.keeps_gathered:
            self.reshard()

    @contextmanager
    def evaluation_batch(self) -> Iterator[None]:
        self._sharded.begin_evaluation()
        self._is_in_batch = True
        yield
        self._is_in_batch = False
        self._sharded.end_forward()

    def close(self) -> None:
        super().close()
        free_methods(self.module.modules())
        for hook in self._hooks:
            hook.remove()

    def _shard(self, module: nn.Module) -> None:
        if problem := problem_of_sharding(module, self._sharding):
            raise UsageError(problem)
        mesh = DeviceMesh.from_group(self.layout.shards, self.layout.device.type)
        # Outputs of units remain in 16 bits, so that the next unit need not convert them.
        policy = partial(MixedPrecisionPolicy, self._gathered_in, torch.float32 if self._gathered_in else None)
        shard = partial(fully_shard, mesh=mesh, offload_policy=self._offload_policy)
        units = list(units_of(module, self._sharding.units).values())
        for unit in units:
            self._place_whole(unit, units, module)
            shard(unit, reshard_after_forward=self._sharding.stage == 3, mp_policy=policy())
        output = torch.float32 if self._gathered_in else None
        self._place_whole(module, units, module)
        shard(module, reshard_after_forward=False, mp_policy=policy(output_dtype=output))

    def _place_whole(self, part: nn.Module, units: Sequence[nn.Module], module: nn.Module) -> None:
        """Put a part of a module, without units inside it, on the device, with the values of rank 0. On the meta device, they are drawn.

        One unit after another is whole on the device, so that a model can be larger than the memory of a GPU.
        """
        layers = list(own_layers(part, units))
        if any(is_on_meta(layer) for layer in layers):
            materialize(module, layers, self.layout.device)
        tensors = [
            tensor for layer in layers for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        ]
        for tensor in tensors:
            tensor.data = tensor.to(self.layout.device)
        broadcast_from_rank_0(tensors, self.layout.everyone)

    @property
    def _offload_policy(self) -> OffloadPolicy:
        """Policy of torch for where the shards wait. Only memory of an accelerator is copied faster from pinned memory."""
        if self._sharding.offload == "none":
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.layout.device.type != "cpu")

    @property
    def _gathered_in(self) -> torch.dtype | None:
        """Dtype in which parameters are gathered; None for their own."""
        return self._compute if self._sharding.gather == "compute" else None

    def _check_sharded(self, module: nn.Module) -> None:
        if not isinstance(module, FSDPModule):
            raise UsageError(
                "run.model() got a module that has sharded submodules but is not sharded itself; call fully_shard() on it as well"
            )
        shards: dict[str, Any] = dict(module.named_parameters())
        if whole := [name for name, parameter in shards.items() if not is_sharded_tensor(parameter)]:
            raise UsageError(
                f"run.model() got a module whose parameter {whole[0]!r} is not sharded, so that its gradient would not be reduced; "
                "call fully_shard() without ignored_params"
            )
        for name, shard in shards.items():
            if shard.device_mesh.ndim != 1 or shard.device_mesh.size() != self.layout.world_size:
                raise UsageError(
                    f"run.model() got a module whose parameter {name!r} is not sharded over all workers, for example because a mesh of "
                    "two dimensions replicates the shards; call fully_shard() without mesh, or set sharding.stage in the job's YAML "
                    "instead"
                )
            if shard.is_complex():
                raise UsageError(
                    f"run.model() got a sharded module whose parameter {name!r} is complex, which optimizers of torch can leave unchanged "
                    "in shards; train it without fully_shard()"
                )
            if shard.device.type != self.layout.device.type:
                raise UsageError(
                    f"run.model() got a module whose parameter {name!r} is on {shard.device.type}, and the worker trains on "
                    f"{self.layout.device.type}; call fully_shard() without offload_policy, or leave the sharding to sharding.stage and "
                    "sharding.offload"
                )
        if self._sharding.gather == "compute":
            raise UsageError(
                "sharding.gather=compute has no effect on a module that the script has sharded; pass mp_policy to fully_shard(), or leave "
                "the sharding to sharding.stage"
            )
        if self._sharding.offload == "all":
            raise UsageError(
                "sharding.offload=all has no effect on a module that the script has sharded; leave the sharding to sharding.stage, or "
                "remove sharding.offload"
            )
        if _has_equal_shards(shards, self.layout):
            raise UsageError(
                "run.model() got a module of which each rank has drawn its shards like a model of its own, so that the weights depend on "
                "the number of workers; initialize the module before fully_shard() instead of with to_empty(), or train on GPUs"
            )

    def compute_in(self, dtype: torch.dtype) -> None:
        if self._gathered_in is None:
            super().compute_in(dtype)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Accept an optimizer of the sharded parameters.

        Raises:
            UsageError: It has other parameters, or its results on shards may be others than on whole parameters.
        """
        is_chosen = self._sharding.stage > 0
        device = next((each.device for each in self.parameters), self.layout.device)
        is_known = set_up_optimizer(optimizer, self.parameters, device, is_chosen)
        # Norms in float64 depend on the split.
        self.has_same_bits = is_known and not any(each.dtype == torch.float64 for each in self.parameters)
        super().prepare(model, optimizer)

    def reshard(self) -> None:
        """Free gathered parameters. A forward pass without a backward pass, as in a validation, leaves them."""
        self._sharded.reshard()

    def begin_step(self, work: Sequence[MicroBatch]) -> None:
        self.reshard()
        if self._has_run:
            # Torch remembers forward passes that no backward pass has followed, and would gather their units once more.
            FSDPModule.reset_iter_state(cast(FSDPModule, self.module))
        before = self.trainable
        super().begin_step(work)
        if whole := [parameter for parameter in self.parameters if not is_sharded_tensor(parameter)]:
            names = {id(parameter): name for name, parameter in self.module.named_parameters()}
            raise UsageError(
                f"the parameter {names[id(whole[0])]!r} was added to the model or replaced after run.model(), so that it is not sharded as "
                "the others are; do this before run.model()"
            )
        units = units_of(self.module, self._sharding.units) if self.trainable is not before else {}
        if units and (problem := problem_of_dtypes(self.module, units, "a sharded model")):
            raise UsageError(problem)
        own_hooks = 1  # the accumulator's
        if any(len(parameter._backward_hooks or ()) > own_hooks for parameter in self.trainable):
            raise UsageError(
                "a parameter of a sharded model has a hook of register_hook(), which torch does not call, because gradients are those "
                "of whole parameters; remove it, and change gradients between step.reduce() and step.update()"
            )

    def watch_gradients(self, show: ShowGradient) -> None:
        self._sharded.show = show

    def before_forward(self, is_last: bool) -> None:
        """Keep the parameters gathered from one micro-batch to the next, if no worker has more to come and the stage allows it."""
        super().before_forward(is_last)
        self._is_in_batch = True
        if self._frees_once:
            for part in _parts(self.module):
                FSDPModule.set_reshard_after_backward(part, is_last, recurse=False)

    def backward(self, loss: Tensor, weight: float, micro_batch: MicroBatch, is_last: bool) -> None:
        if is_sharded_tensor(loss):
            raise UsageError(PROBLEM_OF_SHARDS)
        super().backward(loss, weight, micro_batch, is_last)
        self._sharded.after_backward()
        self._is_in_batch = False
        # Torch does not free what a batch has gathered and whose loss does not depend on the model.
        if is_last or not self._frees_once:
            self.reshard()
        for name, former in self._former.items():
            if (parameter := former()) is not None and parameter.grad is not None:
                raise UsageError(
                    f"the forward pass used {name!r} as it was before run.model(), from a list or another attribute of the script, where "
                    "it trains nothing; use the attribute of its module, or set sharding.stage=0"
                )

    def step(self, applies: bool = True) -> None:
        """Step the optimizer. What a forward pass of the script has gathered since the last backward pass would be out of date."""
        self.reshard()
        place_gradients(self.parameters)
        is_settled = not isinstance(self.optimizer, Settles) or self.optimizer.settled is not None
        is_local = is_settled and has_known_results(self.optimizer) and not has_own_step(self.optimizer)
        with on_local_parts(self.optimizer) if is_local else nullcontext():
            super().step(applies)
        watch_changes([*self.parameters, *leaves(self.optimizer.state)], is_new=True)

    def finish_gradients(
        self, samples: int, *, max_norm: float | None = None, loss_scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        found = super().finish_gradients(samples, max_norm=max_norm, loss_scale=loss_scale)
        watch_changes([parameter.grad for parameter in self.parameters], is_new=False)
        return found

    def changed_shards(self) -> int:
        gradients = (parameter.grad for parameter in self.parameters)
        return changed_shards([*self.parameters, *leaves(self.optimizer.state), *gradients])


def _parts(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def _has_equal_shards(shards: dict[str, Any], layout: Layout) -> bool:
    """Return whether each parameter begins alike on all ranks, which draw from equal generators. Constant ones say nothing."""
    begins = {name: shard.to_local().detach().flatten()[:8].tolist() for name, shard in shards.items()}
    ranks: list[Any] = [None] * layout.world_size
    dist.all_gather_object(ranks, begins, group=layout.control)
    drawn = [name for name in begins if all(len(set(rank[name])) > 1 for rank in ranks)]
    return layout.world_size > 1 and bool(drawn) and all(rank[name] == begins[name] for rank in ranks for name in drawn)
