"""What no state of a run has, and is lost when it resumes: tensors of modules that are no part of the model, and buffers of the model that
are not persistent. The first step shows whether it changes any."""

import gc
from itertools import chain, starmap

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from undula.recovery.fingerprint import Watched, differ


class StateBeside:
    """Tensors of all modules of this process that are no part of the model, as they are before a step.

    Args:
        model: Model of the run.
    """

    def __init__(self, model: nn.Module):
        inside = {id(layer) for layer in model.modules()}
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._before = [
            (layer, name, tensor, version_of(tensor))
            for layer in _modules()
            if id(layer) not in inside
            for name, tensor in _tensors(layer).items()
            if id(tensor) not in own
        ]
        self._unsaved = [
            (path, layer, name, _watched(layer, name).take())
            for path, layer in model.named_modules()
            for name in sorted(layer._non_persistent_buffers_set)
            if layer._buffers.get(name) is not None
        ]

    def changed(self) -> str | None:
        """Return the class of a module and its tensor, as in "Centre.mean", if one has changed; None if none has."""
        for layer, name, tensor, version in self._before:
            now = _tensors(layer).get(name)
            if now is not tensor or version_of(now) != version:
                return f"{type(layer).__name__}.{name}"
        return None

    def unsaved(self) -> str | None:
        """Return the name of a buffer of the model that is not persistent, if its values have changed; None if none has."""
        for path, layer, name, before in self._unsaved:
            if layer._buffers.get(name) is not None and differ(before, _watched(layer, name).take()):
                return f"{path}.{name}".removeprefix(".")
        return None


def _watched(layer: nn.Module, name: str) -> Watched:
    return Watched(lambda: [buffer] if (buffer := layer._buffers[name]) is not None else [])


def _modules() -> list[nn.Module]:
    """Return the modules that exist in this process.

    ``gc.get_objects()`` also gives tuples that other threads are building, which fail with a SystemError if they go on
    while somebody holds them. So its list exists only within a call that runs no Python code and keeps the
    interpreter's lock, and only the classes come out; their instances are then among what refers to a class.
    """
    objects = chain.from_iterable(starmap(gc.get_objects, [()]))
    classes = filter(nn.Module.__subclasscheck__, set(map(type, objects)))
    # The class is asked, because isinstance() would run code of stand-ins for objects that are made when they are used.
    return [each for each in gc.get_referrers(*classes) if issubclass(type(each), nn.Module)]


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a layer itself; none of one that is not initialized."""
    try:
        return {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
    except AttributeError:
        return {}


def version_of(tensor: Tensor) -> int:
    """Return how often operations have changed a tensor in place; 0 if torch does not count it."""
    return 0 if is_lazy(tensor) or tensor.is_inference() else tensor._version
