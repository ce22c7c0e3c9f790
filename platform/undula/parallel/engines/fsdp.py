"""The engine of models that torch's `fully_shard` has sharded. It is imported only for such a model, because the import is slow."""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from undula.errors import UsageError
from undula.parallel.capabilities import FSDP
from undula.parallel.engines.engine import Engine, trainable


class FSDPEngine(Engine):
    """Trains a module that gathers its parameters and reduces their gradients itself."""

    capabilities = FSDP

    def place(self, module: nn.Module) -> nn.Module:
        """Accept the module as it is. Its weights follow from the run's seed on every rank.

        Raises:
            UsageError: Only parts of the module are sharded.
        """
        if not isinstance(module, FSDPModule):
            raise UsageError(
                "run.model() got a module of which only parts are sharded: call fully_shard() on the module itself as well"
            )
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # the losses are weighted, so that gradients add up
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
        self.module: nn.Module = module
        self.trainable = trainable(module)
        return module

    def before_forward(self, is_last: bool) -> None:
        """Accumulate gradients on the rank until the last micro-batch."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(is_last)
