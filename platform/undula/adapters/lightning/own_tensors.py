"""Tensors in attributes of callbacks and a LightningModule, which are no part of the run's state and depend on the batches of the rank."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from undula.adapters.lightning.stand_in import FitTrainer
from undula.adapters.refusals import AVERAGE
from undula.errors import UsageError
from undula.train.beside import version_of
from undula.train.metrics import is_metric

OPAQUE = (torch.optim.Optimizer, LRScheduler, DataLoader, Dataset, FitTrainer, FunctionType, MethodType, ModuleType, type)  # fmt: skip
"""Types of attributes whose tensors are the run's, or no state."""
DEPTH = 4
"""Maximum number of containers and objects around a tensor."""
MAX_ELEMENTS = 10_000
"""Maximum number of elements of a container; one with more has data and no weights."""


@dataclass(frozen=True)
class Held:
    """A tensor in an attribute, as `OwnTensors.take` has seen it."""

    name: str
    """Class and attribute, as in "Averages.means"."""
    tensor: "ref[Tensor]"
    version: int
    in_module: bool
    """Whether a torch module has it, in which a run looks for state beside the model by itself."""


@dataclass(frozen=True)
class Moved:
    """A tensor of an attribute that has changed."""

    name: str
    tensor: Tensor
    is_in_place: bool
    is_new: bool
    """Whether there was no tensor in its place."""
    in_module: bool


class OwnTensors:
    """Floating-point tensors in the attributes of callbacks and of a module, beside its parameters and buffers.

    Args:
        module: The LightningModule.
        callbacks: Callbacks without a state_dict of their own.
    """

    def __init__(self, module: nn.Module, callbacks: Sequence[object]):
        self._module = module
        self._owners = [*callbacks, module]
        self._before: dict[str, Held] = {}

    def take(self) -> None:
        """Remember the tensors as they are now."""
        self._before = {key: held for key, held, _ in self._held()}

    def moved(self) -> list[Moved]:
        """Return the tensors that are new or have changed since `take`."""
        found = []
        for key, held, tensor in self._held():
            before = self._before.get(key)
            is_same = before is not None and before.tensor() is tensor
            if before is None or not is_same or before.version != held.version:
                found.append(Moved(held.name, tensor, is_same, before is None, held.in_module))
        return found

    def refuse_average(self, moved: Sequence[Moved]) -> None:
        """Refuse tensors that hooks have just put into the parameters, or may have computed them of.

        Raises:
            UsageError: A tensor that has changed has the value of a parameter, or was changed in place and has the shape of one.
        """
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in map(_local, self._module.parameters()):
            by_shape.setdefault(parameter.shape, []).append(parameter)
        for each in moved:
            own = _local(each.tensor)
            alike = by_shape.get(own.shape, ())
            if alike and (each.is_in_place or any(torch.equal(own.to(it), it) for it in alike)):
                raise UsageError(
                    f"{each.name} changes while the run trains, and the hooks of a validation put it into the model, so that means would "
                    f"depend on the number of workers and begin anew after a resume; {AVERAGE}"
                )

    def _held(self) -> Iterator[tuple[str, Held, Tensor]]:
        """Return each tensor, with the path to it."""
        inside = {id(layer) for layer in self._module.modules()}
        state = {id(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}
        # A detached parameter is another tensor with the same memory.
        places = {_local(tensor).data_ptr() for tensor in (*self._module.parameters(), *self._module.buffers())}
        of_torch = vars(nn.Module()).keys()
        for number, owner in enumerate(self._owners):
            for attribute, value in vars(owner).items():
                if owner is self._module and attribute in of_torch:
                    continue
                name = f"{type(owner).__name__}.{attribute}"
                for path, tensor, in_module in _tensors(value, inside, DEPTH):
                    if id(tensor) not in state and _local(tensor).data_ptr() not in places - {0}:
                        held = Held(name, ref(tensor), version_of(tensor), in_module)
                        yield f"{number}.{attribute}{path}", held, tensor


def _tensors(value: Any, inside: set[int], depth: int) -> Iterator[tuple[str, Tensor, bool]]:
    """Return the floating-point tensors of a value with their paths in it, and whether a torch module has them."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.layout == torch.strided:
            yield "", value, False
    elif isinstance(value, nn.Module):
        if id(value) not in inside and not is_metric(value):
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                for path, each, _ in _tensors(tensor, inside, 0):
                    yield f".{name}{path}", each, True
    elif depth and not isinstance(value, OPAQUE):
        for place, part in _parts(value):
            for path, tensor, in_module in _tensors(part, inside, depth - 1):
                yield f".{place}{path}", tensor, in_module


def _parts(value: Any) -> list[tuple[object, Any]]:
    """Return the elements of a container, or the attributes of another object of the script."""
    if isinstance(value, dict | list | tuple | deque):  # others may read their elements from a file
        if len(value) > MAX_ELEMENTS:
            return []
        return list(value.items() if isinstance(value, dict) else enumerate(value))
    is_of_library = type(value).__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "undula")
    return [] if is_of_library else list(getattr(value, "__dict__", {}).items())


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has."""
    part: Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return part.detach()
