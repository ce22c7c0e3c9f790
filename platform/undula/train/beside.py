"""State of modules that are no part of the model, which is lost when a run resumes. The first step shows whether there is any."""

import gc

from torch import Tensor, nn


class StateBeside:
    """Tensors of all modules of this process that are no part of the model, as they are before a step.

    Args:
        model: Model of the run.
    """

    def __init__(self, model: nn.Module):
        inside = {id(layer) for layer in model.modules()}
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        # The class is asked, because isinstance() would run code of stand-ins for objects that are made when they are used.
        beside = [it for it in gc.get_objects() if issubclass(type(it), nn.Module) and id(it) not in inside]
        self._before = [
            (layer, name, tensor, _version(tensor))
            for layer in beside
            for name, tensor in _tensors(layer).items()
            if id(tensor) not in own
        ]

    def changed(self) -> str | None:
        """Return the class of a module and its tensor, as in "Centre.mean", if one has changed; None if none has."""
        for layer, name, tensor, version in self._before:
            now = _tensors(layer).get(name)
            if now is not tensor or _version(now) != version:
                return f"{type(layer).__name__}.{name}"
        return None


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a layer itself; none of one that is not initialized."""
    try:
        return {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
    except AttributeError:
        return {}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
