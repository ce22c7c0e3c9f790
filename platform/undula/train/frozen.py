"""Frozen parameters of a model, which are a part of the state: a script can unfreeze a layer at one step and never again."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from undula.state.model_state import named_parameters
from undula.train.step_part import StepPart

FROZEN = "frozen_parameters"
"""Name of the value in the state: lists of the names of frozen parameters, those `at_start` and those `now`."""


class FrozenParameters(StepPart):
    """Frozen parameters of a model.

    A state has them if they have changed since the script made the model. If a script has other parameters frozen at the start than it had
    when the state was saved, it was changed, or decides by itself what is frozen after a resume. The parameters then remain as they are.

    Args:
        model: Model of the run, as the script has made it.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._at_start = self._frozen()

    def state(self) -> dict[str, Any]:
        """Return the value of the state by its name, if there is one."""
        now = self._frozen()
        return {FROZEN: {"at_start": self._at_start, "now": now}} if now != self._at_start else {}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Freeze and unfreeze the parameters as they were when a state was saved."""
        saved = values.get(FROZEN)
        if saved and saved["at_start"] == self._at_start:
            for name, parameter in named_parameters(self._model):
                parameter.requires_grad_(name not in saved["now"])

    def _frozen(self) -> list[str]:
        return [name for name, parameter in named_parameters(self._model) if not parameter.requires_grad]
