"""Batches as scripts make them: tensors in any nesting of mappings, lists, tuples and dataclasses, and objects that move themselves."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch
from torch import Tensor


def with_tensors(
    batch: Any, function: Callable[[Tensor], Tensor], others: Callable[[Any], Any] = lambda other: other
) -> Any:
    """Return a batch with the result of a function in place of each tensor.

    Mappings, lists, tuples, also named ones, and dataclasses keep their types.

    Args:
        batch: The batch.
        function: Function of a tensor.
        others: Function of an object of another type; by default, such objects are returned as they are.
    """

    def replaced(value: Any) -> Any:
        return with_tensors(value, function, others)

    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        values = {key: replaced(value) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return values
        made = copy(batch)  # keeps what else the mapping knows, as the BatchEncoding of a tokenizer does
        made.update(values)
        return made
    if _moves_itself(batch):
        return others(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(replaced, batch))
    if type(batch) is tuple:
        return tuple(map(replaced, batch))
    if isinstance(batch, list):
        rows = copy(batch)
        rows[:] = map(replaced, batch)
        return rows
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        other = copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(other, field.name, replaced(getattr(batch, field.name)))  # it may be frozen
        return other
    return others(batch)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch whose tensors are on a device. Objects with a method `to`, such as a batch of graphs, move themselves."""
    return with_tensors(
        batch, lambda tensor: tensor.to(device), lambda other: other.to(device) if _moves_itself(other) else other
    )


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors that `with_tensors` would replace, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif _moves_itself(batch):
        return
    elif type(batch) is tuple or isinstance(batch, list) or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        for value in batch:
            yield from tensors_of(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors_of(getattr(batch, field.name))


def _moves_itself(batch: object) -> bool:
    """Return whether an object has a method that moves it, as a PackedSequence, some of whose tensors must stay on the CPU."""
    return not isinstance(batch, type) and callable(getattr(batch, "to", None))
