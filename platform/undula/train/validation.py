"""Validation on a fixed set of samples, which virtual workers share as in training, so that its result is equal at any world size.

A loss may draw random numbers, for example to mask tokens. They are keyed like those of training, but not by the step of the run.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from undula.data.nested import with_tensors
from undula.errors import UsageError
from undula.parallel.layout import Layout
from undula.parallel.random_state import kept_random_state
from undula.plan.plan import Plan
from undula.recovery.progress import DATA, SHARDED_VALIDATE, VALIDATE, Phase
from undula.state.goals import LOSS
from undula.train.job import Job
from undula.train.randomness import seed_validation
from undula.train.samples import AnyStream

ValidationFunction = Callable[[Any], Tensor | Mapping[str, Tensor | float]]
"""Function that returns the mean loss over a batch's samples, as a scalar tensor, or several means by name, of which one is "loss"."""


class Validation:
    """Validates the model on one rank.

    Args:
        model: Module that the script calls.
        function: Function that returns the means of a batch.
        job: Settings of the job.
        plan: Plan of a validation.
        stream_of: Function that returns the rank's samples of a validation.
        layout: Layout of the worker group.
        enter: Function that is called with each phase that the rank enters.
        equal_rounds: Whether all ranks must run the same number of micro-batches, because forward passes contain collectives.
    """

    def __init__(
        self,
        model: nn.Module,
        function: ValidationFunction,
        job: Job,
        plan: Plan,
        stream_of: Callable[[], AnyStream],
        layout: Layout,
        enter: Callable[[Phase], None],
        equal_rounds: bool,
    ):
        self._model = model
        self._means_of = function
        self._job = job
        self._plan = plan
        self._stream_of = stream_of
        self._layout = layout
        self._enter = enter
        self._phase = SHARDED_VALIDATE if equal_rounds else VALIDATE
        self._rounds = layout.rounds(self._plan, range(self._plan.total_steps)) if equal_rounds else 0

    def sums(self) -> tuple[dict[str, list[float]], int]:
        """Return the sums of each mean over the samples of each micro-batch of this rank, by name, and the number of all these samples.

        Raises:
            UsageError: The function did not return means, or other ones than for a batch before.
        """
        with kept_random_state(), torch.no_grad():
            return self._sums()

    def _sums(self) -> tuple[dict[str, list[float]], int]:
        virtual_workers = self._layout.virtual_workers(self._job.plan.virtual_workers)
        stream = self._stream_of()
        steps = range(self._plan.total_steps)
        sums: dict[str, list[float]] = {}
        batches = samples = 0
        was_training = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            for each in self._plan.work(steps, virtual_workers):
                self._enter(DATA)
                batch = stream.take(each.virtual_worker, each.samples).batch
                seed_validation(self._job.plan.seed, each.step, each.virtual_worker, each.number)
                means = self._checked(self._run(batch))
                if batches and means.keys() != sums.keys():
                    raise UsageError(
                        f"the validation function returned {sorted(means)} after {sorted(sums)}; return the same names for every batch"
                    )
                for name, mean in means.items():
                    sums.setdefault(name, []).append(mean * each.samples)
                batches, samples = batches + 1, samples + each.samples
            for _ in range(self._rounds - batches):
                self._enter(DATA)
                self._run(stream.any_rows(1).batch)
        finally:
            stream.close()
            for module, mode in was_training.items():
                module.training = mode  # unlike train(), this keeps layers in eval mode that the script has frozen
        return (sums, samples) if self._layout.leads_cell else ({}, 0)

    def _run(self, batch: Any) -> Mapping[str, Tensor | float]:
        self._enter(self._phase)
        device = self._layout.device
        found = self._means_of(with_tensors(batch, lambda tensor: tensor.to(device)))
        return found if isinstance(found, Mapping) else {LOSS: found}

    def _checked(self, means: Mapping[str, Tensor | float]) -> dict[str, float]:
        """Return the means as numbers, after checking that they are means by name."""
        if LOSS not in means:
            raise UsageError(
                f"the validation function returned {sorted(means)} without {LOSS!r}; return the mean loss under that name"
            )
        for name, mean in means.items():
            if isinstance(mean, Tensor) and mean.numel() != 1:
                raise UsageError(
                    f"the validation function returned {name!r} as a tensor of shape {tuple(mean.shape)}; return its mean over the batch"
                )
        return {str(name): float(mean) for name, mean in means.items()}
