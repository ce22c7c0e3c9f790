"""Conversion of state values to JSON and back, with the tensors that they contain kept separately.

A checkpoint stores the JSON beside its tensors, so that it needs no pickle.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from undula.errors import CheckpointError, UsageError
from undula.state.pieces import dtype_named, is_sharded_tensor

Json: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
PLAIN = (type(None), bool, int, float, str)
"""Types of values that JSON preserves."""


def encode(name: str, value: object, tensors: dict[str, Tensor]) -> Json:
    """Convert a value to JSON from which `decode` restores an equal value of the same type.

    Args:
        name: Name of the value in the run's state, for messages and for the names of its tensors.
        value: Tensor, None, Boolean, number, string or dtype, or a tuple, list or dictionary of these. A NumPy number becomes a Python
            number.
        tensors: Dictionary to which the tensors in the value are added, by name.

    Raises:
        UsageError: The value has another type.
    """
    if isinstance(value, Tensor):
        while name in tensors:  # a dictionary may have the keys 1 and "1"
            name += "'"
        tensors[name] = checked(name, value)
        return {"tensor": name, "device": value.device.type}
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in PLAIN:
        return value  # type: ignore[return-value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [encode(f"{name}.{place}", item, tensors) for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict) and type(value) is dict:
        pairs = [[encode(name, key, {}), encode(f"{name}.{key}", item, tensors)] for key, item in value.items()]
        return {"dict": pairs}
    raise UsageError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which no checkpoint can hold; "
        "keep it as a tensor, a number, a string, or a list, tuple or dict of these"
    )


def decode(value: Json, tensors: Mapping[str, Any], device: torch.device | None = None) -> Any:
    """Convert the JSON of `encode` back to the value.

    Args:
        value: JSON that `encode` returned.
        tensors: Tensors in the value, by name.
        device: Device for tensors that were not in host memory; None to leave all tensors where they are.
    """
    if isinstance(value, list):
        return [decode(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tensor": name, "device": was_on}:
            tensor = tensors[name]
            return tensor if device is None or was_on == "cpu" else tensor.to(device)
        case {"dtype": name}:
            return dtype_named(name)
        case {"tuple": items}:
            return tuple(decode(item, tensors, device) for item in items)
        case {"dict": pairs}:
            return {decode(key, tensors): decode(item, tensors, device) for key, item in pairs}
    raise CheckpointError(
        f"a checkpoint has {value!r}, which this version of Undula cannot read; use the version that wrote it"
    )


def tensor_names(value: Json) -> Iterator[str]:
    """Yield the names of the tensors in the JSON of `encode`."""
    if isinstance(value, list):
        for item in value:
            yield from tensor_names(item)
    elif isinstance(value, dict):
        if "tensor" in value:
            yield value["tensor"]
        else:
            for item in value.values():
                yield from tensor_names(item)


def leaves(value: object) -> Iterator[object]:
    """Yield the values and the dictionary keys in nested lists, tuples and dictionaries."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def checked(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor, detached, after checking that a checkpoint can hold it.

    Raises:
        UsageError: The tensor is sparse or quantized, has no shape yet, or has a class that checkpoints do not support.
    """
    if is_lazy(tensor):
        raise UsageError(f"{name} has no shape yet; pass one batch through the lazy module before run.model(...)")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = str(tensor.layout).removeprefix("torch.") if tensor.layout is not torch.strided else "quantized"
        raise UsageError(
            f"{name} is a {kind} tensor, which no checkpoint can hold; keep it dense, or use another optimizer"
        )
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) and not is_sharded_tensor(tensor):
        raise UsageError(
            f"{name} is a tensor of class {type(tensor).__module__}.{type(tensor).__qualname__}, which no checkpoint can hold; "
            "keep it as a plain tensor"
        )
    return tensor.detach()
