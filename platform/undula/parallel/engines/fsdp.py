"""The engine of a model that is sharded; imported only where there is one, as torch's part of it takes a while."""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from undula.parallel.engines.torch_engines import Engine


class ShardedEngine(Engine):
    """For a module that the script has sharded with torch's `fully_shard`, which gathers parameters and reduces gradients itself."""

    rounds_must_match = True

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module as it is: its weights are those of the run's seed on every rank."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # the losses are weighted, so that gradients add up
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
        return module

    def before_micro_batch(self, model: nn.Module, is_last: bool) -> None:
        """Gradients add up here until the last micro-batch."""
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(is_last)
