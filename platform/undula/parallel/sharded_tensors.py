"""What sharded tensors do otherwise than in torch, so that a script has the results that it has with whole tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from undula.errors import UsageError
from undula.parallel.collectives import meet
from undula.state.boxes import whole_box
from undula.state.pieces import copy_overlap, piece_of

_given: Any = WeakIdKeyDictionary()
"""References to the tensors that scripts got as `data` of a sharded one, whose memory they share, by the sharded one."""
_owners: Any = WeakIdKeyDictionary()
"""Reference to the sharded tensor from which a script got a tensor as `data`, by that tensor."""
_gathered = DTensor.full_tensor


def adapt_sharded_tensors() -> None:
    """Change in this process, from now on, what sharded tensors do: refuse numbers of a worker's shard alone, compute norms of the whole
    tensors, gather them only once all ranks are there, and take what is assigned to `data`.

    A sum over a sharded tensor is one of the worker's part until something needs the whole, for which `item()` does not ask. Random numbers
    of the shape of a sharded tensor are drawn for each shard by a generator of the same state. Norms of shards, which
    `torch.nn.utils.clip_grad_norm_` takes, are put together in an order that depends on the number of workers. In torch, an
    assignment to `data` of a sharded tensor leaves the shard as it is.
    """
    DTensor.full_tensor = full_tensor  # type: ignore
    DTensor.data = property(_data, _set_data)  # type: ignore[assignment]
    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _number
    handlers |= dict.fromkeys(dispatcher._random_ops, _random)
    handlers[torch.ops.aten.linalg_vector_norm.default] = _norm
    handlers[torch.ops.aten._foreach_norm.Scalar] = _norms


def full_tensor(sharded: DTensor, **keywords: Any) -> Tensor:
    """Gather a sharded tensor as torch does, once the scripts of all ranks are there."""
    if sharded.device_mesh.ndim == 1 and sharded.device_mesh.size() > 1:
        meet(sharded.device_mesh.get_group())
    return _gathered(sharded, **keywords)


def _data(sharded: DTensor) -> Tensor:
    found: Any = Tensor.data.__get__(sharded)  # type: ignore[attr-defined]
    _given[sharded] = [*(each for each in _given.get(sharded, ()) if each() is not None), ref(found)]
    _owners[found] = ref(sharded)
    return found  # type: ignore[no-any-return]


def _set_data(sharded: DTensor, value: Tensor) -> None:
    """Copy a tensor, sharded or whole, into a sharded one. All ranks must call this.

    What `data` was before keeps its values, as where a script puts an average of the weights into the model and then the weights back.
    """
    if value.shape != sharded.shape or value.dtype != sharded.dtype:
        raise UsageError(
            f"the script assigned {_text(value)} to the data of a sharded tensor, which has {_text(sharded)}; assign a tensor of the same "
            "dtype and shape"
        )
    owner = _owners[value]() if value in _owners else None
    if owner is not None and owner is not sharded:
        raise UsageError(
            "the script assigned the data of one sharded parameter to another one, but shards share no memory; assign "
            "a clone of it, or give both modules the same parameter before run.model()"
        )
    with torch.no_grad():
        new = value.clone()
        for each in _given.pop(sharded, ()):
            if (given := each()) is not None:
                given._local_tensor = given._local_tensor.clone()
        if isinstance(new, DTensor):
            sharded.copy_(new)
        else:
            copy_overlap(whole_box(tuple(new.shape)), new, piece_of(sharded))


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _number(operation: object, arguments: tuple[Any, ...], keywords: object) -> float:
    (tensor,) = arguments
    if any(not placement.is_replicate() for placement in tensor.placements):
        raise UsageError(
            "the script read a number of a sharded tensor with item() or float(), where each worker has only its part; call full_tensor() "
            "on it first, on all workers"
        )
    return tensor.to_local().item()  # type: ignore[no-any-return]


def _norm(operation: Callable[..., Tensor], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Tensor:
    """Return a norm with the bits that it has for a whole tensor. All ranks must call this."""
    tensor, *rest = arguments
    norm = operation(tensor.full_tensor(), *rest, **keywords)
    return DTensor.from_local(norm, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim, run_check=False)


def _norms(
    operation: Callable[..., Sequence[Tensor]], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> list[Tensor]:
    """Return norms of several tensors, of which one after another is whole."""
    tensors, *rest = arguments
    return [
        _norm(lambda whole, *of, **by: operation([whole], *of, **by)[0], [each, *rest], keywords) for each in tensors
    ]


def _random(operation: object, arguments: object, keywords: object) -> NoReturn:
    raise UsageError(
        f"the script drew random numbers of the shape of a sharded tensor ({operation}), which depend on the number of workers; draw them "
        "before run.model(), or of the shape of the whole tensor"
    )
