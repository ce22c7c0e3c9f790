"""Engine of models that torch's `fully_shard` has sharded. It is imported only for such a model, because the import is slow."""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from undula.errors import UsageError
from undula.parallel.capabilities import FSDP
from undula.parallel.engines.engine import Engine, trainable
from undula.state.pieces import is_sharded_tensor


class FSDPEngine(Engine):
    """Engine for a module that gathers its parameters and reduces their gradients itself."""

    capabilities = FSDP

    def place(self, module: nn.Module) -> nn.Module:
        """Accept the module without copying weights between ranks: each rank has initialized its shards from the run's seed.

        Raises:
            UsageError: Submodules are sharded, but the module itself is not, or a parameter is not sharded.
        """
        if not isinstance(module, FSDPModule):
            raise UsageError(
                "run.model() got a module that has sharded submodules but is not sharded itself; call fully_shard() on it as well"
            )
        if whole := [name for name, each in module.named_parameters() if not is_sharded_tensor(each)]:
            raise UsageError(
                f"run.model() got a module whose parameter {whole[0]!r} is not sharded, so that its gradient would not be reduced; "
                "call fully_shard() without ignored_params"
            )
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # losses are weighted already, so gradients are summed
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale a sum
        self.module: nn.Module = module
        self.trainable = trainable(module)
        return module

    def before_forward(self, is_last: bool) -> None:
        """Accumulate gradients on this rank, without reducing them, until the last micro-batch."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(is_last)
