"""Batches as scripts make them: tensors in any nesting of mappings, lists and tuples."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

from torch import Tensor


def with_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with the result of a function in place of each tensor.

    Mappings, lists and tuples, also named ones, keep their types. Objects of other types are returned as they are.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        values = {key: with_tensors(value, function) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return values
        made = copy(batch)  # keeps what else the mapping knows, as the BatchEncoding of a tokenizer does
        made.update(values)
        return made
    if _is_named_tuple(batch):
        return type(batch)(*(with_tensors(value, function) for value in batch))
    if type(batch) in (list, tuple):
        return type(batch)(with_tensors(value, function) for value in batch)
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors that `with_tensors` would replace, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif type(batch) in (list, tuple) or _is_named_tuple(batch):
        for value in batch:
            yield from tensors_of(value)


def _is_named_tuple(batch: object) -> bool:
    # A PackedSequence is one, too, but has a tensor that must stay on the CPU, and a method of its own that moves the others.
    return isinstance(batch, tuple) and hasattr(batch, "_fields") and not hasattr(batch, "to")
