"""Numbers of sharded tensors that would differ between workers without a word: those of a worker's own part, and random ones."""

from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from undula.errors import UsageError


def refuse_local_numbers() -> None:
    """Refuse, from now on in this process, what torch computes of a worker's shard alone.

    A sum over a sharded tensor is one of the worker's part until something needs the whole, for which `item()` does not ask. Random numbers
    of the shape of a sharded tensor are drawn for each shard by a generator of the same state.
    """
    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _number
    handlers |= dict.fromkeys(dispatcher._random_ops, _random)


def _number(operation: object, arguments: tuple[Any, ...], keywords: object) -> float:
    (tensor,) = arguments
    if any(not placement.is_replicate() for placement in tensor.placements):
        raise UsageError(
            "the script read a number of a sharded tensor with item() or float(), where each worker has only its part; call full_tensor() "
            "on it first, on all workers"
        )
    return tensor.to_local().item()  # type: ignore[no-any-return]


def _random(operation: object, arguments: object, keywords: object) -> NoReturn:
    raise UsageError(
        f"the script drew random numbers of the shape of a sharded tensor ({operation}), which depend on the number of workers; draw them "
        "before run.model(), or of the shape of the whole tensor"
    )
