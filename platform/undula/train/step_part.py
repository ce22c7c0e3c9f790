"""Parts of a step beside the model and the optimizer, each of which may have state of its own, such as an average of the weights.

Other packages add parts by entry points of the group `undula.parts` (docs/extending.md).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from undula import extensions
from undula.data.script.pickling import unpickled
from undula.errors import UsageError
from undula.parallel.layout import Layout
from undula.plan.plan import OptimizerStep
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
