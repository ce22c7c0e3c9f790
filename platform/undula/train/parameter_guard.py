"""Refusal of steps in which forward passes change parameters, which a rank would do once for each micro-batch that it runs."""

from collections.abc import Sequence

from torch import nn

from undula.errors import UsageError
from undula.state.pieces import is_sharded_tensor


class ParameterGuard:
    """Notices parameters that change between the first batch of a step and its update, by torch's counters of changes in place.

    They miss what is written by way of `parameter.data`, for which elements are compared (`recovery.baseline`).

    Args:
        module: Module that has the parameters.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        # flatten_parameters() of an RNN moves its weights to other memory without changing them.
        recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
        self._moving = {id(parameter) for part in recurrent for parameter in part.parameters()}

    def begin_step(self, parameters: Sequence[nn.Parameter]) -> None:
        # Forward passes of a sharded model replace its parameters by whole ones.
        is_sharded = bool(parameters) and is_sharded_tensor(parameters[0])
        self._parameters = [each for each in parameters if not is_sharded and id(each) not in self._moving]
        self._versions = [each._version for each in self._parameters]

    def end_step(self) -> None:
        """Raise UsageError if torch has counted a change of a parameter."""
        versions = [each._version for each in self._parameters]
        if versions != self._versions:
            changed = next(place for place, version in enumerate(versions) if version != self._versions[place])
            names = {id(each): name for name, each in self._module.named_parameters()}
            raise changed_in_step(f"the parameter {names.get(id(self._parameters[changed]), '')!r}")


def changed_in_step(what: str) -> UsageError:
    """Return the error of a step in which parameters have changed."""
    return UsageError(
        f"{what} changed between the first batch of a step and step.update(), for example in the forward pass, but a rank would change it "
        "once for each of its micro-batches; change it after step.update()"
    )
