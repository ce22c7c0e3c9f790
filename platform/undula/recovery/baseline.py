"""What a script may change between two steps, as it was when the run's state was known to be that of a committed step.

A group can end while the script works between two steps, for example while it validates with averaged weights in place of the model's. What
is in the model then must not be handed over as the state of the step.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from undula.recovery.fingerprint import Fingerprint, Watched, differ, digest_of
from undula.state.values import leaves

WORK = "work since the update"
"""Name of a value of a state: what the script has done since the last update."""
UPDATED, IN_LOOP, IN_WORK, LATER = range(4)
"""Places after an update, in order: right after it, the end of the loop's body, the end of a validation and `after_step`, and the beginning
of the next batches."""


@dataclass
class Work:
    """What the script has done since the last update of the optimizer, and what it usually does."""

    place: int = UPDATED
    """Place up to which the state is known to be unchanged since the last of `changes`."""
    changes: int = 0
    """Places at whose end the script was found to have changed this rank's part of the weights or of the optimizer's state, as bits."""
    habits: int = 0
    """Places at which the script has changed them on any rank in a committed step, as bits."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Work":
        """Return the work that the values of a state describe."""
        return cls(*values.get(WORK, (IN_WORK,)))

    def values(self) -> dict[str, Any]:
        """Return the value of a state by its name; nothing if the script has done its work, and never changes anything."""
        value = [self.place, self.changes, self.habits]
        return {WORK: value} if value != [IN_WORK, 0, 0] else {}

    @property
    def changed_last(self) -> int:
        """Place at whose end a change was found last; UPDATED if there was none."""
        return self.changes.bit_length()

    def lasts_until(self, later: "Work") -> int:
        """Return the last place at which the state is known to be unchanged, given what the same rank knew about it later."""
        changes = later.changes & ~self.changes
        return first_of(changes) - 1 if changes else max(self.place, later.place)


def bit_of(place: int) -> int:
    """Return the bit of a place after UPDATED."""
    return 1 << (place - 1)


def first_of(places: int) -> int:
    """Return the first of some places, given as bits."""
    return (places & -places).bit_length()


class Baseline:
    """Buffers and settings of the optimizer at a step boundary, which can be put back, and a fingerprint of parameters and optimizer state.

    Parameters and the state of the optimizer are not copied, because that would take memory for a second model.

    Args:
        module: Module of the run. Its parameters and the places of its buffers must stay the same objects.
        optimizer: Optimizer of the run.

    Attributes:
        work: What the script has done since the last update.
        finds_changes: Whether to find out at each place whether the script has changed anything, for which a GPU is waited for.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer):
        self._parameters, self._modules = list(module.parameters()), list(module.modules())
        self._watched = Watched(self._tensors_of_updates)
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
        self._seen: Fingerprint | None = None
        self.work = Work()
        self.finds_changes = False

    def take(self, place: int = IN_WORK) -> None:
        """Remember the values as they are now, at a place after an update: the state is that of the last committed step."""
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
        self._look(place)
        self._is_taken = True

    def updated(self, habits: int) -> None:
        """Note that the optimizer has stepped, or skipped a step.

        Args:
            habits: Changes since the update before, on any rank, as bits.
        """
        self.work, self._seen = Work(habits=self.work.habits | habits), None
        if self.finds_changes:
            self._look(UPDATED)

    def begin(self, values: Mapping[str, Any], finds_changes: bool) -> None:
        """Go on after the work that the values of a restored state describe."""
        self.work, self.finds_changes = Work.of(values), finds_changes
        self._seen = self._watched.take()

    def _look(self, place: int) -> None:
        """Take a fingerprint, unless that was done right after the update and this is no later place."""
        if place == UPDATED and self._seen is not None:
            return
        former, self._seen = self._seen, self._watched.take()
        if self.finds_changes and former is not None and bool(differ(former, self._seen)):
            self.work.changes |= bit_of(place)
        self.work.place = max(place, self.work.place)  # a restored state may be of a later place

    def drop(self) -> None:
        """Forget the values, because the state is not that of a committed step from now on."""
        self._is_taken = False
        self._watched.release()

    def moved(self) -> Tensor:
        """Return a Boolean scalar on the device, which says whether parameters or the optimizer's state have changed since `take`."""
        return differ(self._watched.take(), self._seen or {})

    def weights(self) -> Tensor:
        """Return 16 bits of a digest of the parameters and the state of the optimizer at the last place, as a number on the device."""
        return digest_of(self._seen or {})

    def settings(self) -> int:
        """Return 16 bits of a digest of the settings of the optimizer, of what is frozen, and of the modules in evaluation mode."""
        groups = [
            {key: value for key, value in group.items() if isinstance(value, int | float | str | None)}
            for group in self._optimizer.param_groups
        ]
        frozen = bytes(parameter.requires_grad for parameter in self._parameters)
        modes = bytes(module.training for module in self._modules)
        return int.from_bytes(blake2b(repr((groups, frozen, modes)).encode(), digest_size=2).digest(), "big")

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

    def _tensors_of_updates(self) -> list[Tensor]:
        return [*self._parameters, *(value for value in leaves(self._optimizer.state) if isinstance(value, Tensor))]

    def _tensors(self) -> list[Tensor]:
        return [buffer.detach() for _, _, buffer in self._buffers if buffer is not None]


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    if sources:
        torch._foreach_copy_(targets, sources)
