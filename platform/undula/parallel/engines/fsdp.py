"""The engine of models that torch's `fully_shard` has sharded; imported only for one, because torch's part of it takes a while."""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from undula.errors import UsageError
from undula.parallel.capabilities import FSDP
from undula.parallel.engines.engine import Engine, trainable


class FSDPEngine(Engine):
    """Trains a module that gathers its parameters and reduces their gradients itself."""

    capabilities = FSDP

    def place(self, module: nn.Module) -> nn.Module:
        """Take the module as it is: its weights are those of the run's seed on every rank.

        Raises:
            UsageError: only parts of it are sharded.
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
        """Have gradients add up on the rank until the last micro-batch."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(is_last)
