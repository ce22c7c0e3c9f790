"""Engine of models that torch's `fully_shard` has sharded. It is imported only for such a model, because the import is slow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from undula.errors import UsageError
from undula.parallel.capabilities import FSDP
from undula.parallel.engines.engine import Engine
from undula.parallel.layout import Layout
from undula.plan.plan import MicroBatch
from undula.state.pieces import is_sharded_tensor


class FSDPEngine(Engine):
    """Engine for a module that gathers its parameters and reduces their gradients itself, so that its accumulator need not."""

    capabilities = FSDP

    def place(self, module: nn.Module) -> nn.Module:
        """Accept the module without copying weights between ranks: each rank has initialized its shards from the run's seed.

        Raises:
            UsageError: Submodules are sharded, but the module itself is not, or a parameter is not sharded, or the weights depend on the
                number of ranks.
        """
        if not isinstance(module, FSDPModule):
            raise UsageError(
                "run.model() got a module that has sharded submodules but is not sharded itself; call fully_shard() on it as well"
            )
        if whole := [name for name, parameter in module.named_parameters() if not is_sharded_tensor(parameter)]:
            raise UsageError(
                f"run.model() got a module whose parameter {whole[0]!r} is not sharded, so that its gradient would not be reduced; "
                "call fully_shard() without ignored_params"
            )
        if _has_equal_shards(module, self.layout):
            raise UsageError(
                "run.model() got a module of which each rank has drawn its shards like a model of its own, so that the weights depend on "
                "the number of workers; initialize the module before fully_shard() instead of with to_empty(), or train on GPUs"
            )
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # losses are weighted already, so gradients are summed
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale a sum
        self._attach(module)
        return module

    def compute_in(self, dtype: torch.dtype) -> None:
        """Replace the policy of each sharded module. torch reads it at the first forward pass, and has no public function to set it."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                output = torch.float32 if part is self.module else None
                policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=output)
                state = part._get_fsdp_state()
                state._mp_policy = policy
                for group in _groups(state):
                    group.mp_policy = policy

    def begin_step(self, micro_batches: int) -> None:
        """Begin a step with the sharded parameters. A forward pass without a backward pass, as in a validation, leaves whole ones."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        super().begin_step(micro_batches)

    def before_forward(self, is_last: bool) -> None:
        """Accumulate gradients on this rank, without reducing them, until the last micro-batch."""
        super().before_forward(is_last)
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(is_last)

    def backward(self, loss: Tensor, weight: float, micro_batch: MicroBatch, is_last: bool) -> None:
        if micro_batch.samples:
            super().backward(loss, weight, micro_batch, is_last)
        else:
            with _only_zeros(loss):
                super().backward(loss, weight, micro_batch, is_last)


def _has_equal_shards(module: nn.Module, layout: Layout) -> bool:
    """Return whether each parameter begins alike on all ranks, which draw from equal generators. Constant ones say nothing."""
    shards: dict[str, Any] = dict(module.named_parameters())
    begins = {name: shard.to_local().detach().flatten()[:8].tolist() for name, shard in shards.items()}
    ranks: list[Any] = [None] * layout.world_size
    dist.all_gather_object(ranks, begins, group=layout.control)
    drawn = [name for name in begins if all(len(set(rank[name])) > 1 for rank in ranks)]
    return layout.world_size > 1 and bool(drawn) and all(rank[name] == begins[name] for rank in ranks for name in drawn)


def _groups(state: Any) -> Sequence[Any]:
    """Return the groups of a sharded module's own parameters. Before torch 2.13, there is at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


@contextmanager
def _only_zeros(loss: Tensor) -> Iterator[None]:
    """Make every gradient of a loss zero.

    A weight of zero is not enough: the mean over no valid label is NaN, and so is its gradient times zero. The backward pass must run
    nevertheless, because the other ranks wait for its collectives.
    """
    hooks = [node.register_prehook(_zeros) for node in _nodes_below(loss)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zeros(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def _nodes_below(loss: Tensor) -> set[Node]:
    """Return all nodes of the autograd graph that computed the loss."""
    found: set[Node] = set()
    new = [loss.grad_fn] if loss.grad_fn else []
    while new:
        node = new.pop()
        if node not in found:
            found.add(node)
            new += [below for below, _ in node.next_functions if below is not None]
    return found
