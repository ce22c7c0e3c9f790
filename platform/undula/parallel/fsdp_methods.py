"""What the methods that torch's `fully_shard` gives to a module do while a run trains it."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule

from undula.errors import UsageError

METHODS: Mapping[str, Literal["works", "outside of batches", "has no effect", "is refused"]] = {
    "reset_iter_state": "is refused",
    "reshard": "outside of batches",
    "set_all_reduce_hook": "is refused",
    "set_allocate_memory_from_process_group_for_comm": "is refused",
    "set_custom_all_gather": "is refused",
    "set_custom_reduce_scatter": "is refused",
    "set_force_sum_reduction_for_comms": "is refused",
    "set_gradient_divide_factor": "is refused",
    "set_is_last_backward": "has no effect",
    "set_modules_to_backward_prefetch": "works",
    "set_modules_to_forward_prefetch": "works",
    "set_post_optim_event": "works",
    "set_reduce_scatter_divide_factor": "is refused",
    "set_reduce_scatter_max_input_buffers": "works",
    "set_reduce_scatter_unused_params": "is refused",
    "set_requires_all_reduce": "has no effect",
    "set_requires_gradient_sync": "has no effect",
    "set_reshard_after_backward": "is refused",
    "set_reshard_after_forward": "is refused",
    "set_separate_reduce_scatter_group": "is refused",
    "set_symm_mem_for_comm": "is refused",
    "set_unshard_in_backward": "is refused",
    "unshard": "works",
}
"""Public methods of FSDPModule, and what a call does after `run.model()`.

Those without effect only save communication in loops that accumulate gradients, which the run does itself. In a batch, parameters stay
gathered as the stage says."""


def guard_methods(parts: Iterable[FSDPModule], is_in_batch: Callable[[], bool]) -> None:
    """Undo what a script has set in sharded modules that decides gradients, and guard their methods from now on.

    Args:
        parts: Sharded modules.
        is_in_batch: Function that returns whether a batch is open.
    """
    for part in parts:
        part.set_requires_gradient_sync(True, recurse=False)
        part.set_is_last_backward(True)
        part.set_reshard_after_backward(True, recurse=False)
        part.set_unshard_in_backward(True)
        for name, effect in METHODS.items():
            if effect == "has no effect":
                setattr(part, name, _ignore)
            elif effect == "is refused":
                setattr(part, name, partial(_refuse, name))
        part.reshard = partial(_reshard, part, is_in_batch)  # type: ignore[method-assign]


def free_methods(parts: Iterable[nn.Module]) -> None:
    """Give sharded modules their methods back."""
    for part in parts:
        for name in METHODS:
            vars(part).pop(name, None)


def _ignore(*_: object, **__: object) -> None:
    pass


def _reshard(part: FSDPModule, is_in_batch: Callable[[], bool]) -> None:
    if not is_in_batch():
        FSDPModule.reshard(part)


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise UsageError(
        f"{name}() was called on a sharded model after run.model(), where the run decides how parameters and gradients travel; remove the "
        "call, and set sharding.stage and the gradient section of the job's YAML instead"
    )
