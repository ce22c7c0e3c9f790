"""Parts of a step beside the model and the optimizer, each of which may have state of its own, such as an average of the weights.

Other packages add parts by entry points of the group `undula.parts` (docs/extending.md).

Also here: loss scale of runs that compute in fp16, with the rule and the defaults of torch.amp.GradScaler.

fp16 has no numbers below 6e-8, so small gradients would become 0. The loss is multiplied by the scale before the backward pass, and the
gradients are divided by it before anything reads them. If a gradient overflows, the step is skipped and the scale is lowered; after many
steps without an overflow, it is raised.

Also here: frozen parameters of a model, which are a part of the state: a script can unfreeze a layer at one step and never again.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from undula import extensions
from undula.data.script.pickling import unpickled
from undula.errors import UsageError
from undula.parallel.layout import Layout
from undula.plan.plan import OptimizerStep
from undula.plan.precision import PrecisionSpec
from undula.state.model_state import named_parameters
from undula.state.pieces import Piece, piece_of
from undula.train.job import Job
from undula.train.step_reduction import StepTotals

GROUP = "undula.parts"


@dataclass(frozen=True)
class Update:
    """An update of the model that all ranks have taken."""

    step: OptimizerStep
    totals: StepTotals
    clock: float
    """Position of the schedule after the step, in samples of the base batch."""

    @property
    def applies(self) -> bool:
        """Whether the optimizer has stepped. It skips a step whose gradient overflows on any rank."""
        return not self.totals.overflows


class StepPart:
    """Something that takes part in each step. A run calls these methods; a part overrides those that it needs.

    All ranks call the methods, each with its own micro-batches. The state must be a function of what is equal on all ranks, of the
    weights, whose shards a part treats as the optimizer does, or, in `Rows`, of the micro-batches of one virtual worker.
    """

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the JSON values of a restored state. Tensors of `state` have been restored in place."""

    def begin_step(self, index: int, merged_steps: int) -> None:
        """Begin a step.

        Args:
            index: Number of the step in the plan.
            merged_steps: Number of steps of the plan that it merges.
        """

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch, before its forward pass."""

    def begin_backward(self) -> None:
        """Begin the backward pass of the micro-batch."""

    def end_micro_batch(self, samples: int, virtual_worker: int) -> None:
        """End the micro-batch after its backward pass.

        Args:
            samples: Number of its samples. There are none if it is run for its collectives only, as other ranks have more.
            virtual_worker: The virtual worker, which is one of this rank if there are samples.
        """

    def end_step(self, samples: int) -> None:
        """End the micro-batches of a step of so many samples, after its gradient was reduced."""

    def updated(self, update: Update) -> Mapping[str, float]:
        """Follow an update of the model. No snapshot is copying the state then.

        Returns:
            What was measured, by name, for the row of the step.
        """
        return {}

    def state(self) -> Mapping[str, Any]:
        """Return the state, by name: tensors that change in place, as `undula.state.pieces.piece_of` or `Rows` gives them, and JSON values.

        A tensor may change only in `updated`.
        """
        return {}


MakePart: TypeAlias = Callable[[Any, nn.Module, torch.optim.Optimizer, Layout, int], StepPart | None]
"""Function that makes a part of the steps of a job from the `config` of its script, its model, its optimizer, the layout of its workers and
the number of virtual workers; it returns None for a job without that part."""


def added_parts(
    job: Job, module: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout, virtual_workers: int
) -> dict[str, StepPart]:
    """Return the parts that other packages add to the steps of a job, by name.

    Raises:
        UsageError: One of them is not a StepPart, or has state under a name that does not begin with its own.
    """
    parts: dict[str, StepPart] = {}
    for name in extensions.names(GROUP, {}):
        make: MakePart = extensions.load(GROUP, {}, name)
        part = make(unpickled(job.config), module, optimizer, layout, virtual_workers)
        if part is None:
            continue
        if not isinstance(part, StepPart):
            raise UsageError(
                f"{name!r} of {GROUP} made an object of type {type(part).__name__}; return a StepPart or None"
            )
        if other := next((key for key in part.state() if not key.startswith(f"{name}.")), None):
            raise UsageError(f"{name!r} of {GROUP} has state under the name {other!r}; let it begin with '{name}.'")
        parts[name] = part
    return parts


STATE = "precision.loss_scale"


INITIAL_SCALE = 2.0**16


SCALE_GROWTH = 2.0


SCALE_BACKOFF = 0.5


GROWTH_INTERVAL = 2000
"""Number of steps in a row without an overflow after which the scale grows."""


LONG_SKIPPED_STEPS = 25
"""Number of skipped steps in a row after which a warning says so; a dynamic scale has then been divided by 2^25."""


@dataclass(frozen=True)
class Scale:
    """Loss scale, and what its rule counts."""

    factor: float = INITIAL_SCALE
    finite_steps: int = 0
    """Number of steps in a row without an overflow since the scale last changed."""
    skipped_steps: int = 0
    """Number of steps in a row up to the last one that were skipped."""

    def after(self, overflows: bool, is_dynamic: bool = True, interval: int = GROWTH_INTERVAL) -> "Scale":
        """Return the scale after one more step."""
        if overflows:
            return Scale(self.factor * (SCALE_BACKOFF if is_dynamic else 1.0), 0, self.skipped_steps + 1)
        if not is_dynamic or self.finite_steps + 1 < interval:
            return Scale(self.factor, self.finite_steps + 1)
        with np.errstate(over="ignore"):
            grown = float(np.float32(self.factor * SCALE_GROWTH))  # like GradScaler's scale, it may not exceed fp32
        return Scale(grown if math.isfinite(grown) else self.factor)


class LossScale(StepPart):
    """Loss scale of a run on this rank. It is the same on all ranks, because they agree on which steps overflow."""

    def __init__(self, precision: PrecisionSpec):
        self.is_used = precision.compute == "fp16"
        """Whether the loss is scaled."""
        self._is_dynamic = precision.loss_scale == "dynamic"
        first = Scale() if precision.loss_scale == "dynamic" else Scale(precision.loss_scale)
        # The state is a tensor, so that snapshots and checkpoints copy it like the weights: it changes with every step.
        self._state = torch.tensor(astuple(first), dtype=torch.float64, device="cpu")
        self._piece = piece_of(self._state)

    def state(self) -> dict[str, Piece]:
        """Return the scale for a checkpoint, as a tensor that is restored in place; empty if the loss is not scaled."""
        return {STATE: self._piece} if self.is_used else {}

    @property
    def current(self) -> Scale:
        factor, finite_steps, skipped_steps = self._state.tolist()
        return Scale(factor, int(finite_steps), int(skipped_steps))

    @property
    def factor(self) -> float | None:
        """Factor on the loss of the step; None if the loss is not scaled."""
        return self.current.factor if self.is_used else None

    def updated(self, update: Update) -> dict[str, float]:
        """Follow an update, and return the scale that it had."""
        if not self.is_used:
            return {}
        before = self.current
        after = before.after(not update.applies, self._is_dynamic, GROWTH_INTERVAL)
        self._state.copy_(torch.tensor(astuple(after), dtype=torch.float64, device="cpu"))
        return {"loss_scale": before.factor}


EVALUATES = "modules_in_evaluation"
"""Name of the value in the state: lists of the names of modules in evaluation mode, those `at_start` and those `now`."""
FROZEN = "frozen_parameters"
"""Name of the value in the state: lists of the names of frozen parameters, those `at_start` and those `now`."""


class FrozenParameters(StepPart):
    """Frozen parameters of a model, and its modules in evaluation mode.

    A state has them if they have changed since the script made the model. If a script has other parameters frozen at the start than it had
    when the state was saved, it was changed, or decides by itself what is frozen after a resume. The parameters then remain as they are.

    Args:
        model: Model of the run, as the script has made it.
    """

    def __init__(self, model: nn.Module):
        self._model, self._modules = model, dict(model.named_modules())
        self._at_start = self._frozen()
        self._evaluates = self._evaluates_at_start = self._in_evaluation()

    def begin_step(self, index: int, merged_steps: int) -> None:
        """Note the modes in which the step trains. In between, a validation of the script may have others."""
        self._evaluates = self._in_evaluation()

    def state(self) -> dict[str, Any]:
        """Return the values of the state by their names, as far as there are any."""
        now, modes = self._frozen(), {"at_start": self._evaluates_at_start, "now": self._evaluates}
        frozen = {FROZEN: {"at_start": self._at_start, "now": now}} if now != self._at_start else {}
        return {**frozen, EVALUATES: modes} if self._evaluates != self._evaluates_at_start else frozen

    def restore(self, values: Mapping[str, Any]) -> None:
        """Freeze and unfreeze the parameters as they were when a state was saved, and give the modules their modes."""
        modes = values.get(EVALUATES)
        if modes and modes["at_start"] == self._evaluates_at_start:
            for name, module in self._modules.items():
                module.training = name not in modes["now"]
        saved = values.get(FROZEN)
        if saved and saved["at_start"] == self._at_start:
            for name, parameter in named_parameters(self._model):
                parameter.requires_grad_(name not in saved["now"])

    def _in_evaluation(self) -> list[str]:
        return [name for name, module in self._modules.items() if not module.training]

    def _frozen(self) -> list[str]:
        return [name for name, parameter in named_parameters(self._model) if not parameter.requires_grad]
