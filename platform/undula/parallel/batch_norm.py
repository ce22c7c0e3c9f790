"""Batch normalization over the samples of one virtual worker, in place of torch's SyncBatchNorm.

SyncBatchNorm takes its statistics over the micro-batches that all ranks run at the same time, so they depend on the number of ranks, and
it waits for the other ranks in each forward pass, although these may have fewer micro-batches.
"""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from undula.errors import UsageError


class BatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d in one. SyncBatchNorm knows only from its input which of them it is."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def problem_of_batch_norm(module: nn.Module) -> str | None:
    """Return the reason why the SyncBatchNorms of a module cannot be replaced, as a sentence; None if they can."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and type(layer) is not nn.SyncBatchNorm:
            return (
                f"run.model() got a module whose layer {name!r} is a {type(layer).__name__}, a kind of SyncBatchNorm, whose statistics "
                "depend on the number of workers; use BatchNorm, whose statistics are those of a virtual worker"
            )
    return None


def replace_sync_batch_norm(module: nn.Module) -> list[str]:
    """Make each SyncBatchNorm of a module a BatchNorm. The layers, their parameters and their buffers remain the same objects.

    Returns:
        Names of these layers; that of the module itself is empty.

    Raises:
        UsageError: A layer is of a subclass of SyncBatchNorm, whose forward pass may do something else.
    """
    if problem := problem_of_batch_norm(module):
        raise UsageError(problem)
    synced = {name: part for name, part in module.named_modules() if isinstance(part, nn.SyncBatchNorm)}
    for layer in synced.values():
        layer.__class__ = BatchNorm  # type: ignore[assignment]
        del layer.process_group  # a copy of the module could not copy it
    return list(synced)
