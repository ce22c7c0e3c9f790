"""Tensors and generators in attributes of callbacks, a trainer or a LightningModule, which are no part of the run's state and depend on the
batches of the rank.
"""

import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from undula.adapters.refusals import AVERAGE
from undula.errors import UsageError
from undula.train.metrics import is_metric
from undula.train.script_variables import version_of

OPAQUE = (torch.optim.Optimizer, LRScheduler, DataLoader, Dataset, FunctionType, MethodType, ModuleType, type)
"""Types of attributes whose tensors are the run's, or no state."""
LIBRARIES = ("lightning", "pytorch_lightning", "transformers", "accelerate", "trl", "peft", "datasets", "undula")
"""Packages of libraries. Objects of their classes are not searched, unless they are owners themselves."""
Random: TypeAlias = torch.Generator | np.random.Generator | random.Random
WATCHED_STEPS = 3
"""Number of steps whose changes are reported."""
DEPTH = 4
"""Maximum number of containers and objects around a tensor."""
MAX_ELEMENTS = 10_000
"""Maximum number of elements of a container; one with more has data and no weights."""


@dataclass(frozen=True)
class Held:
    """A tensor in an attribute, as `OwnTensors.take` has seen it."""

    name: str
    """Class and attribute, as in "Averages.means"."""
    tensor: "ref[Tensor] | None"
    """None for a generator, of which the state counts."""
    version: int
    in_module: bool
    """Whether a torch module has it, in which a run looks for state beside the model by itself."""


@dataclass(frozen=True)
class Moved:
    """A tensor or a generator of an attribute that has changed."""

    name: str
    tensor: Tensor | Random
    is_in_place: bool
    is_new: bool
    """Whether there was no tensor in its place."""
    in_module: bool


class OwnTensors:
    """Floating-point tensors and generators in the attributes of some objects, beside the parameters and buffers of a module.

    Args:
        module: Model of the run.
        owners: Callbacks without a state_dict of their own, a trainer, or the module.
        saved: Names of attributes of the owners that belong to the run's state.
    """

    def __init__(self, module: nn.Module, owners: Sequence[object], saved: Collection[str] = ()):
        self._module, self._owners = module, owners
        self._others = {*saved, *vars(nn.Module())}
        self._before: dict[str, Held] = {}
        self._reported: set[str] = set()

    def take(self) -> None:
        """Remember the tensors as they are now."""
        self._before = {key: held for key, held, _ in self._held()}

    def moved(self) -> list[Moved]:
        """Return the tensors that are new or have changed since `take`."""
        found = []
        for key, held, tensor in self._held():
            before = self._before.get(key)
            is_same = before is not None and (before.tensor is None or before.tensor() is tensor)
            if before is None or not is_same or before.version != held.version:
                found.append(Moved(held.name, tensor, is_same, before is None, held.in_module))
        return found

    def after_step(self, index: int, report: Callable[[str], None]) -> None:
        """Report what one of the first steps has changed since `take`, each attribute once.

        After the first step, a tensor that is replaced may be an output that is shown.
        """
        for each in self.moved() if index < WATCHED_STEPS else ():
            is_state = each.is_in_place or (index == 0 and not each.is_new)
            if is_state and not each.in_module and each.name not in self._reported:
                self._reported.add(each.name)
                report(each.name)

    def refuse_average(self, moved: Sequence[Moved]) -> None:
        """Refuse tensors that hooks have just put into the parameters, or may have computed them of.

        Raises:
            UsageError: A tensor that has changed has the value of a parameter, or was changed in place and has the shape of one.
        """
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in map(_local, self._module.parameters()):
            by_shape.setdefault(parameter.shape, []).append(parameter)
        for each in moved:
            if not isinstance(each.tensor, Tensor):
                continue
            own = _local(each.tensor)
            alike = by_shape.get(own.shape, ())
            if alike and (each.is_in_place or any(torch.equal(own.to(it), it) for it in alike)):
                raise UsageError(
                    f"{each.name} changes while the run trains, and the hooks of a validation put it into the model, so that means would "
                    f"depend on the number of workers and begin anew after a resume; {AVERAGE}"
                )

    def _held(self) -> Iterator[tuple[str, Held, Tensor | Random]]:
        """Return each tensor and generator, with the path to it."""
        inside = {id(layer) for layer in self._module.modules()}
        state = {id(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}
        # A detached parameter is another tensor with the same memory.
        places = {_local(tensor).data_ptr() for tensor in (*self._module.parameters(), *self._module.buffers())}
        for number, owner in enumerate(self._owners):
            for attribute, value in vars(owner).items():
                if attribute in self._others:
                    continue
                name = f"{type(owner).__name__}.{attribute}"
                for path, each, in_module in _tensors(value, inside, DEPTH):
                    place = f"{number}.{attribute}{path}"
                    if not isinstance(each, Tensor):
                        yield place, Held(name, None, _version_of_generator(each), in_module), each
                    elif id(each) not in state and _local(each).data_ptr() not in places - {0}:
                        yield place, Held(name, ref(each), version_of(each), in_module), each


def _version_of_generator(generator: Random) -> int:
    """Return a number that changes with the state of a generator."""
    if isinstance(generator, torch.Generator):
        return hash(generator.get_state().numpy().tobytes())
    return hash(repr(generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state))


def _tensors(value: Any, inside: set[int], depth: int) -> Iterator[tuple[str, Tensor | Random, bool]]:
    """Return the floating-point tensors and generators of a value with their paths in it, and whether a torch module has them."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.layout == torch.strided:
            yield "", value, False
    elif isinstance(value, Random):
        yield "", value, False
    elif isinstance(value, nn.Module):
        if id(value) not in inside and not is_metric(value):
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                for path, part, _ in _tensors(tensor, inside, 0):
                    yield f".{name}{path}", part, True
    elif depth and not isinstance(value, OPAQUE):
        for place, part in _parts(value):
            for path, each, in_module in _tensors(part, inside, depth - 1):
                yield f".{place}{path}", each, in_module


def _parts(value: Any) -> list[tuple[object, Any]]:
    """Return the elements of a container, or the attributes of another object of the script."""
    if isinstance(value, dict | list | tuple | deque):  # others may read their elements from a file
        if len(value) > MAX_ELEMENTS:
            return []
        return list(value.items() if isinstance(value, dict) else enumerate(value))
    is_of_library = type(value).__module__.partition(".")[0] in LIBRARIES
    return [] if is_of_library else list(getattr(value, "__dict__", {}).items())


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has."""
    part: Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return part.detach()
