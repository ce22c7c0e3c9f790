"""Modules on the meta device, whose tensors have shapes but no memory, made real one part after another.

A model that no worker can hold as a whole is made on the meta device. Each of its units is drawn whole before it is sharded, because draws
of shards would depend on the number of workers. What `reset_parameters()` does not fill would be uninitialized memory, and is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from undula.errors import UsageError
from undula.parallel.recompute import RandomState
from undula.state.pieces import local_part

Place: TypeAlias = tuple[nn.Module, str]
"""Layer and the name of one of its tensors."""
PATTERNS = (0xFF, 0xA5)
"""Bytes with which memory is filled before values are drawn. Those of the first are NaN, or -1 of an integer."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Dtypes of elements as integers, by the size of an element in bytes."""
MOST_NAMED = 8
"""Maximum number of tensors that a message names."""


def is_on_meta(module: nn.Module) -> bool:
    """Return whether a tensor of a module has no memory."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def problem_of_meta(module: nn.Module) -> str | None:
    """Return the reason why a module on the meta device cannot be made real, as a sentence; None if it can."""
    for name, layer in module.named_modules():
        if _places_on_meta(layer) and not callable(getattr(layer, "reset_parameters", None)):
            return (
                f"run.model() got a module on the meta device whose layer {name!r}, a {type(layer).__name__}, has no reset_parameters(), "
                "with which its values could be drawn; give it one, or make the model on the CPU"
            )
    return None


def materialize(module: nn.Module, layers: Iterable[nn.Module], device: torch.device, has_values: bool = True) -> None:
    """Give the tensors of layers that are on the meta device memory, and draw their values with `reset_parameters()`.

    Inner layers come before those that contain them, as in constructors, so that an outer one can change what an inner one has drawn.

    Args:
        module: Module that contains the layers, for their names.
        layers: Layers, each of which owns its tensors, and outer ones before inner ones. Parameters that several share stay shared.
        device: The device.
        has_values: Whether tensors have values; those of a count have none.

    Raises:
        UsageError: A tensor is not filled, or a layer writes to tensors of others than these layers.
    """
    layers = list(layers)
    places = [place for layer in layers for place in _places_on_meta(layer)]
    made = _allocated(places, device)
    owners = dict.fromkeys(layer for layer, _ in reversed(places))
    before, written = RandomState.now() if has_values else None, _Written()

    def draw(pattern: int) -> None:
        if before:
            for tensor in made:
                _fill(tensor, pattern)
            before.put_back()
        with written:
            for layer in owners:
                reset: Callable[[], object] = layer.reset_parameters  # type: ignore[assignment]
                reset()

    draw(PATTERNS[0])
    if not has_values:
        still = zip(places, made, strict=True)
        unfilled = [place for place, tensor in still if _tensor_at(place) is tensor and tensor not in written]
    else:
        unfilled = [place for place in places if _is_meta(_tensor_at(place))]
        suspects = [(place, tensor) for place in places if _is_suspect(tensor := _tensor_at(place))]
        if suspects and not unfilled:
            drawn = [(place, _bits_of(tensor).clone()) for place, tensor in suspects]
            draw(PATTERNS[1])  # what differs now depends on what the memory had before
            unfilled = [place for place, bits in drawn if not torch.equal(bits, _bits_of(_tensor_at(place)))]
    gap = "which no reset_parameters() fills, or not all of it; fill it in that of its layer"
    _refuse(module, unfilled, f"{gap}, or make the model on the CPU")
    gap = "which is neither a parameter nor a buffer and so never gets values; make it one with register_buffer()"
    _refuse(module, _attributes_on_meta(layers), f"{gap}, or make the model on the CPU")
    inside = dict.fromkeys(inner for layer in owners for inner in layer.modules())
    others = [layer for layer in inside if layer not in set(layers)]
    foreign = [(layer, name) for layer in others for name, tensor in _own(layer) if tensor in written]
    gap = (
        "which is drawn in a unit of its own, and which the reset_parameters() of a layer outside of it changes as well"
    )
    _refuse(module, foreign, f"{gap}; let each reset_parameters() fill the tensors of its own layer only")


def own_layers(module: nn.Module, units: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module and the layers inside it, without units inside it and their layers."""
    inner = set(units) - {module}

    def within(layer: nn.Module) -> Iterator[nn.Module]:
        yield layer
        for child in layer.children():
            if child not in inner:
                yield from within(child)

    return within(module)


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that notes which memory operations write to. `.data` and views share the memory of their tensor, but not its version."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensors = [leaf for leaf in tree_leaves(given.get(argument.name)) if isinstance(leaf, Tensor)]
                self._storages.update(_storage_of(tensor) for tensor in tensors)
        return func(*args, **(kwargs or {}))

    def __contains__(self, tensor: Tensor) -> bool:
        return _storage_of(tensor) in self._storages


def _own(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that a layer itself has."""
    yield from layer.named_parameters(recurse=False, remove_duplicate=False)
    yield from layer.named_buffers(recurse=False, remove_duplicate=False)


def _places_on_meta(layer: nn.Module) -> list[Place]:
    return [(layer, name) for name, tensor in _own(layer) if _is_meta(tensor)]


def _attributes_on_meta(layers: Iterable[nn.Module]) -> list[Place]:
    """Return attributes with tensors on the meta device that are no parameters and buffers, such as a table of a layer."""
    return [
        (layer, name)
        for layer in layers
        for name, value in vars(layer).items()
        if any(isinstance(leaf, Tensor) and _is_meta(leaf) for leaf in tree_leaves(value))
    ]


def _allocated(places: Sequence[Place], device: torch.device) -> list[Tensor]:
    """Give tensors memory, and return them. A parameter that has several places gets memory once."""
    made: dict[Tensor, Tensor] = {}
    for layer, name in places:
        former = _tensor_at((layer, name))
        if former not in made:
            values = torch.empty_like(former, device=device, requires_grad=False)
            is_parameter = isinstance(former, nn.Parameter)
            made[former] = nn.Parameter(values, former.requires_grad) if is_parameter else values
        setattr(layer, name, made[former])
    return [_tensor_at(place) for place in places]


def _refuse(module: nn.Module, places: Sequence[Place], gap: str) -> None:
    """Raise UsageError if there are places whose tensors are not as they must be."""
    names = {layer: name for name, layer in module.named_modules()} if places else {}
    shown = [repr(f"{names[layer]}.{name}".removeprefix(".")) for layer, name in places[:MOST_NAMED]]
    if places:
        more = f" and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else ""
        raise UsageError(f"run.model() got a module on the meta device with {', '.join(shown)}{more}, {gap}")


def _tensor_at(place: Place) -> Tensor:
    layer, name = place
    tensor: Tensor = getattr(layer, name)
    return tensor


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def _storage_of(tensor: Tensor) -> int:
    return int(local_part(tensor).untyped_storage()._cdata)


def _fill(tensor: Tensor, pattern: int) -> None:
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    memory.set_(tensor.untyped_storage()).fill_(pattern)


def _bits_of(tensor: Tensor) -> Tensor:
    """Return the elements as integers of the same bits, in one dimension."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.dtype.itemsize])


def _is_suspect(tensor: Tensor) -> bool:
    """Return whether a tensor has elements of the first pattern, or NaN, which operations make of it."""
    if _is_meta(tensor):
        return False
    has_nan = tensor.dtype.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex())
    bits = _bits_of(tensor)
    is_first = bits == (PATTERNS[0] if bits.dtype == torch.uint8 else -1)
    return bool(is_first.any()) or (has_nan and bool(tensor.isnan().any()))
