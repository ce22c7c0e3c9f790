"""What a script may change between two steps, as it was when the run's state was known to be that of a committed step.

A group can end while the script works between two steps, for example while it validates with averaged weights in place of the model's. What
is in the model then must not be handed over as the state of the step.
"""

from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from undula.state.pieces import dense_strides, is_sharded

SAMPLES = 64
"""Number of elements of each parameter that are compared."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Dtype in which elements are compared, by their size in bytes, so that NaN equals itself."""


Elements: TypeAlias = dict[tuple[torch.dtype, torch.device], Tensor]
"""Elements by dtype and device."""


class Samples:
    """Some elements of each parameter of a module, which show whether a script has changed the parameters.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module):
        self._parameters = list(module.parameters())
        self._is_sharded = is_sharded(module)
        self._addresses: list[int] = []
        self._views: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        """Views of the elements that are compared, of the parameters at these addresses."""

    def take(self) -> Elements:
        """Return the elements, as integers of the same bits."""
        # Attributes of a DTensor are read without recording an operation.
        own: list[Tensor] = [
            getattr(parameter, "_local_tensor", parameter) if self._is_sharded else parameter
            for parameter in self._parameters
        ]
        addresses = [parameter.data_ptr() for parameter in own]
        if addresses != self._addresses:
            self._addresses, self._views = addresses, {}
            for parameter in own:
                self._views.setdefault((parameter.dtype, parameter.device), []).append(_sample_of(parameter.detach()))
        return {kind: torch.cat(views).view(_INTEGERS[kind[0].itemsize]) for kind, views in self._views.items()}


def differ(now: Elements, then: Elements) -> Tensor:
    """Return a Boolean scalar on the device, which says whether elements have changed."""
    if {kind: tensor.shape for kind, tensor in now.items()} != {kind: tensor.shape for kind, tensor in then.items()}:
        return torch.tensor(True, device="cpu")
    changes = [(now[kind] != then[kind]).any() for kind in then]
    return torch.stack(changes).any() if changes else torch.tensor(False, device="cpu")


class Baseline:
    """Buffers and settings of the optimizer at a step boundary, which can be put back, and elements of the parameters to compare.

    Parameters are not copied, because that would take memory for a second model. A few elements of each are compared instead: everything
    that scripts do to weights between two steps, such as swapping in an average or merging an adapter, changes most elements. Version
    counters of torch would not do, because they miss what is written by way of `parameter.data`.

    Args:
        module: Module of the run. Its parameters and the places of its buffers must stay the same objects.
        optimizer: Optimizer of the run.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer):
        self._samples = Samples(module)
        self._places = [layer._buffers for layer in module.modules() if layer._buffers]
        self._optimizer = optimizer
        self._is_taken = False
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        """Each buffer, with its place."""
        self._copies: list[Tensor] = []
        self._with_extra = [
            layer for layer in module.modules() if type(layer).get_extra_state is not nn.Module.get_extra_state
        ]
        self._extra: list[Any] = []
        self._settings: list[dict[str, Any]] = []
        self._sampled: Elements = {}

    def take(self) -> None:
        """Remember the values as they are now: the state is that of the last committed step."""
        former = [buffer for *_, buffer in self._buffers]
        self._buffers = [(place, key, buffer) for place in self._places for key, buffer in place.items()]
        now = [buffer for *_, buffer in self._buffers]
        if len(now) != len(former) or any(a is not b for a, b in zip(now, former, strict=True)):
            self._copies = [torch.empty_like(tensor) for tensor in self._tensors()]
        _copy(self._tensors(), self._copies)
        self._settings = [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]
        self._extra = [deepcopy(layer.get_extra_state()) for layer in self._with_extra]
        self._sampled = self._samples.take()
        self._is_taken = True

    def drop(self) -> None:
        """Forget the values, because the state is not that of a committed step from now on."""
        self._is_taken = False

    def moved(self) -> Tensor:
        """Return a Boolean scalar on the device, which says whether a parameter has changed since `take`."""
        return differ(self._samples.take(), self._sampled)

    @property
    def is_intact(self) -> bool:
        """Whether `put_back` leads to the state of the committed step. This waits for the device."""
        return self._is_taken and not bool(self.moved())

    def put_back(self) -> None:
        """Restore the buffers, the extra state of modules and the settings of the optimizer."""
        self.put_back_buffers()
        for module, extra in zip(self._with_extra, self._extra, strict=True):
            module.set_extra_state(extra)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=False):
            group.update(settings)

    def put_back_buffers(self) -> None:
        for place, key, buffer in self._buffers:
            place[key] = buffer
        _copy(self._copies, self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [buffer.detach() for _, _, buffer in self._buffers if buffer is not None]


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    if sources:
        torch._foreach_copy_(targets, sources)


def _sample_of(tensor: Tensor) -> Tensor:
    """Return a view of at most SAMPLES elements of a tensor, in one dimension and evenly distributed over its memory."""
    count = tensor.numel()
    every = max(count // SAMPLES, 1) | 1  # odd, so that not all elements are of the same columns
    if tuple(tensor.stride()) != dense_strides(tensor):  # one line of a tensor that is a part of another one
        longest = max(range(tensor.dim()), key=tensor.size)
        middle = tuple(
            slice(None) if dimension == longest else tensor.size(dimension) // 2 for dimension in range(tensor.dim())
        )
        return tensor[middle]
    return tensor.as_strided((-(-count // every),), (every,))
