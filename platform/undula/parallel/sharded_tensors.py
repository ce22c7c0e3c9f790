"""What sharded tensors do otherwise than in torch, so that a script has the results that it has with whole tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves
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
_redistribute: Any = DTensor._op_dispatcher.redistribute_local_args
_watched: dict[int, tuple[ref[Tensor], list[int]]] = {}
"""Shards whose changes count, and how often each was changed, by their storage. A storage is only known by its number while it lives."""


def adapt_sharded_tensors() -> None:
    """Change in this process, from now on, what sharded tensors do: refuse numbers of a worker's shard alone, compute norms of the whole
    tensors, gather them only once all ranks are there, take what is assigned to `data`, and take whole tensors in operations in place.

    A sum over a sharded tensor is one of the worker's part until something needs the whole, for which `item()` does not ask. Random numbers
    of the shape of a sharded tensor are drawn for each shard by a generator of the same state. Norms of shards, which
    `torch.nn.utils.clip_grad_norm_` takes, are put together in an order that depends on the number of workers. In torch, an
    assignment to `data` of a sharded tensor leaves the shard as it is, and so does a change of its rows in place, which are a copy.
    """
    DTensor.full_tensor = full_tensor  # type: ignore
    DTensor.data = property(_data, _set_data)  # type: ignore[assignment]
    dispatcher: Any = DTensor._op_dispatcher
    if dispatcher.redistribute_local_args is _redistribute:
        dispatcher.redistribute_local_args = redistribute_local_args
    handlers = dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _number
    handlers |= dict.fromkeys(dispatcher._random_ops, _random)
    handlers[torch.ops.aten.linalg_vector_norm.default] = _norm
    handlers[torch.ops.aten._foreach_norm.Scalar] = _norms
    propagator = dispatcher.sharding_propagator
    known = [*propagator.op_strategy_funcs, *propagator.op_single_dim_strategy_funcs, torch.ops.aten.fill_.Tensor]
    for operation in filter(_is_in_place, known):
        handlers.setdefault(operation, partial(_change, dispatcher))


def _is_in_place(operation: Any) -> bool:
    schema = operation._schema
    return schema.is_mutable and schema.name.endswith("_") and isinstance(schema.arguments[0].type, torch.TensorType)


def watch_changes(values: Iterable[object], is_new: bool) -> None:
    """Count changes in place of some sharded tensors from now on, and those of former ones no more if `is_new`."""
    if is_new:
        _watched.clear()
    for value in values:
        if isinstance(value, DTensor):
            _watched[_storage_of(value._local_tensor)] = ref(value._local_tensor), [0]


def changed_shards(values: Iterable[object]) -> int:
    """Return 16 bits of a digest of how often each sharded tensor among some values was changed in place since it is watched.

    Ranks have other shards, but change them by the same calls. What a script does to the local part of a tensor does not count.
    """
    shards = [value._local_tensor for value in values if isinstance(value, DTensor)]
    found = [(shard, _watched.get(_storage_of(shard))) for shard in shards]
    counts = [entry[1][0] if entry and entry[0]() is shard else 0 for shard, entry in found]
    return crc32(repr(counts).encode()) & 0xFFFF


def _storage_of(shard: Tensor) -> int:
    return shard.untyped_storage()._cdata  # type: ignore[no-any-return]


def full_tensor(sharded: DTensor, **keywords: Any) -> Tensor:
    """Gather a sharded tensor as torch does, once the scripts of all ranks are there."""
    if sharded.device_mesh.ndim == 1 and sharded.device_mesh.size() > 1:
        meet(sharded.device_mesh.get_group())
    return _gathered(sharded, **keywords)


def redistribute_local_args(operation: Any, schema: Any, *rest: Any) -> None:
    """Give an operation the placements that it needs, as torch does, and if shards are exchanged, once all ranks are there."""
    for now, needed in zip(operation.flat_args_schema, tree_leaves(schema.args_schema), strict=False):
        is_collective = any(not placement.is_replicate() for placement in getattr(now, "placements", ()))
        if is_collective and now != needed and now.mesh.ndim == 1 and now.mesh.size() > 1:
            meet(now.mesh.get_group())
    _redistribute(operation, schema, *rest)


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
            _copy_whole(new, sharded)


def _copy_whole(whole: Tensor, sharded: DTensor) -> None:
    """Copy the rank's part of a whole tensor into its shard. Torch has no rule for this where a dimension has fewer rows than ranks."""
    copy_overlap(whole_box(tuple(sharded.shape)), whole.expand(sharded.shape), piece_of(sharded))


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


def _change(
    dispatcher: Any, operation: Callable[..., Tensor], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Tensor:
    """Change a tensor in place. If it is sharded, those that are not count as whole, with the same values on all ranks."""
    changed = arguments[0]
    is_sharded = isinstance(changed, DTensor)
    storage = _storage_of(changed._local_tensor) if is_sharded else 0
    is_part = is_sharded and changed._is_view() and isinstance(changed._base, DTensor)
    if is_part and storage != _storage_of(changed._base._local_tensor):
        raise UsageError(
            f"the script changed rows of a sharded tensor in place ({operation}), which are a copy, so that the tensor would stay as it "
            "is; change the whole tensor, for example with weight.mul_(mask) or weight.copy_(whole)"
        )
    if storage in _watched:
        _watched[storage][1][0] += 1
    if is_sharded and operation == torch.ops.aten.copy_.default and not isinstance(arguments[1], DTensor):
        _copy_whole(arguments[1], changed)
        return changed  # type: ignore[no-any-return]
    handlers, replicates = dispatcher._custom_op_handlers, dispatcher._allow_implicit_replication
    handler = handlers.pop(operation, None)
    dispatcher._allow_implicit_replication = replicates or is_sharded
    try:
        return operation(*arguments, **keywords)
    finally:
        dispatcher._allow_implicit_replication = replicates
        if handler:  # otherwise another thread has taken it, and puts it back
            handlers[operation] = handler


def _random(operation: object, arguments: object, keywords: object) -> NoReturn:
    raise UsageError(
        f"the script drew random numbers of the shape of a sharded tensor ({operation}), which depend on the number of workers; draw them "
        "before run.model(), or of the shape of the whole tensor"
    )
