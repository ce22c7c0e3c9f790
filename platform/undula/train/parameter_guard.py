"""Refusal of steps in which forward passes change parameters, which a rank would do once for each micro-batch that it runs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from undula.errors import UsageError
from undula.state.pieces import is_sharded_tensor

EVERY = 100
"""Number of steps between two comparisons of the parameters' values."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype in which the bits of an element are read, by the size of the element in bytes."""


class ParameterGuard:
    """Notices parameters that change between the first batch of a step and its update.

    A parameter counts its changes in place, and another tensor has another address. Only changes in place of `parameter.data` leave no
    trace but the values, which are therefore compared in the first step and then in every `EVERY`-th step.

    Args:
        module: Module that has the parameters.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        # flatten_parameters() of an RNN moves its weights to other addresses without changing them.
        recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
        self._moving = {parameter for part in recurrent for parameter in part.parameters()}
        self._steps = 0
        self._parameters: list[nn.Parameter] = []

    def begin_step(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [each for each in parameters if not is_sharded_tensor(each)]
        self._versions = self._found_versions()
        self._bits = self._found_bits() if self._steps % EVERY == 0 else None
        self._steps += 1

    def end_step(self) -> None:
        """Compare the parameters with those that the step began with.

        Raises:
            UsageError: A parameter has changed.
        """
        if (versions := self._found_versions()) != self._versions:
            is_new = [a != b for a, b in zip(versions, self._versions, strict=True)]
            self._refuse(self._parameters[is_new.index(True)])
        if self._bits is not None and not torch.equal(bits := self._found_bits(), self._bits):
            self._refuse(self._parameters[(bits != self._bits).tolist().index(True)])

    def _refuse(self, parameter: nn.Parameter) -> None:
        name = next((name for name, each in self._module.named_parameters() if each is parameter), "")
        raise UsageError(
            f"the parameter {name!r} changed between the first batch of a step and step.update(), but a rank would change it once for each "
            "of its micro-batches; change it after step.update()"
        )

    def _found_versions(self) -> list[tuple[int, int]]:
        return [(0, 0) if each in self._moving else (each._version, each.data_ptr()) for each in self._parameters]

    def _found_bits(self) -> Tensor:
        """Return the sum of the bits of each parameter as integers, on the device."""
        return torch.stack([_as_integers(each.detach()).sum() for each in self._parameters] or [torch.zeros(())])


def _as_integers(values: Tensor) -> Tensor:
    reals = torch.view_as_real(values) if values.is_complex() else values
    return reals.view(_INTEGERS[reals.itemsize])
