"""Validation on a fixed set of samples, which virtual workers share as in training, so that its result is equal at any world size.

A loss may draw random numbers, for example to mask tokens. They are keyed like those of training, but not by the step of the run.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from undula.data.nested import moved
from undula.errors import UsageError
from undula.parallel.collectives import ScriptCollectives, any_rank
from undula.parallel.recompute import kept_random_state
from undula.plan.plan import MicroBatch
from undula.recovery.progress import BETWEEN_STEPS, DATA, SHARDED_VALIDATE, VALIDATE
from undula.state.goals import LOSS
from undula.train.metrics import Place, Taken, is_metric, place_of, results, taken
from undula.train.randomness import seed_validation
from undula.train.samples import SampleSource
from undula.train.setup import RunSetup
from undula.train.step_reduction import exact_means
from undula.train.trained_model import TrainedModel

ValidationFunction = Callable[[Any], Tensor | Mapping[str, Any]]
"""Function that returns the mean loss over a batch's samples, as a scalar tensor, or several means by name, of which one is "loss".

In place of a mean, it may return a metric of torchmetrics that it has updated with the batch.
"""


@dataclass
class Sums:
    """What a rank has added up in a validation."""

    means: dict[str, list[float]] = field(default_factory=dict)
    """Sums of each mean over the samples of each micro-batch, by name."""
    metrics: dict[str, list[tuple[Place, Taken]]] = field(default_factory=dict)
    """What each micro-batch has left in metrics, by name."""
    samples: int = 0

    def add(self, values: Mapping[str, Any], micro_batch: MicroBatch) -> None:
        """Add what the function has returned for a micro-batch.

        Raises:
            UsageError: A value is neither a mean nor a metric, or the names are others than before.
        """
        names = self.means.keys() | self.metrics.keys()
        if self.samples and values.keys() != names:
            raise UsageError(
                f"the validation function returned {sorted(values)} after {sorted(names)}; return the same names for every batch"
            )
        for name, value in _checked(values).items():
            if isinstance(value, Taken):
                self.metrics.setdefault(name, []).append((place_of(micro_batch), value))
            else:
                self.means.setdefault(name, []).append(float(value) * micro_batch.samples)
        self.samples += micro_batch.samples


Means = tuple[dict[str, float], int]
"""Means and results of metrics by name, and the number of samples of which they are."""


class Validation:
    """Validates the model on one rank.

    Args:
        setup: Parts of the run that the rank knows before it has a model.
        model: Model of the run. Changes of its buffers are undone before each batch and at the end, because the number of batches of a
            rank depends on the number of ranks.
        function: Function that returns the means of a batch.
        samples: Source of the rank's samples.
    """

    def __init__(self, setup: RunSetup, model: TrainedModel, function: ValidationFunction, samples: SampleSource):
        self._job, self._layout, self._worker = setup.job, setup.layout, setup.worker
        self._model = model
        self._means_of = function
        self._samples = samples
        self._plan = samples.validation_plan
        # Otherwise forward passes that contain collectives would wait for ranks with fewer micro-batches.
        self._equal_rounds = model.engine.capabilities.equal_rounds
        steps = range(self._plan.total_steps)
        self._rounds = setup.layout.rounds(self._plan, steps) if self._equal_rounds else 0

    def means(self, can_end_early: bool = False) -> Means | None:
        """Validate the model. All ranks call this together.

        Args:
            can_end_early: Whether to end early if the ranks are asked to leave by some time.

        Returns:
            Means over all samples by name, and the number of samples; None if the validation has ended early.

        Raises:
            UsageError: The function returned no means by name, other names for one batch than for the one before, or other names on one
                rank than on another, it has begun a collective, or a metric has no single number as its result.
        """
        control = self._layout.control
        sums = self._sums(can_end_early)
        self._worker.enter(BETWEEN_STEPS)  # the other ranks may still validate
        if can_end_early and any_rank(sums is None, control):
            return None
        assert sums is not None
        means, samples = exact_means(sums.means, sums.samples, control)
        return means | results(sums.metrics, control), samples

    def _sums(self, can_end_early: bool) -> Sums | None:
        """Return the sums over the samples of this rank; None if the validation has ended early."""
        if can_end_early and self._is_asked_to_leave():
            return None
        with self._evaluating():
            return self._sums_in_eval_mode(can_end_early)

    def rehearse(self) -> None:
        """Call the function with arbitrary samples, once with each size of a batch."""
        reader = self._samples.validation()
        with self._evaluating():
            for size in sorted(self._plan.sizes(), reverse=True):
                self._run(reader.any_rows(size or 2).batch)
        reader.close()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        model = self._model
        with kept_random_state(), torch.no_grad(), in_eval_mode(model.module), in_eval_weights(model.optimizer):
            model.engine.keeps_gathered = True
            try:
                yield
            finally:
                model.engine.keeps_gathered = False
                model.engine.reshard()

    def _sums_in_eval_mode(self, can_end_early: bool) -> Sums | None:
        virtual_workers = self._layout.virtual_workers(self._job.plan.virtual_workers)
        reader = self._samples.validation()
        steps = range(self._plan.total_steps)
        work = chain.from_iterable(self._plan.work(range(step, step + 1), virtual_workers) for step in steps)
        sums, batches = Sums(), 0
        try:
            for micro_batch in work:
                if can_end_early and self._is_asked_to_leave():
                    return None
                self._worker.enter(DATA)
                batch = reader.take(micro_batch.virtual_worker, micro_batch.samples).batch
                seed_validation(self._job.plan.seed, micro_batch.step, micro_batch.virtual_worker, micro_batch.number)
                sums.add(self._run(batch), micro_batch)
                batches += 1
            for _ in range(self._rounds - batches):
                if can_end_early and self._is_asked_to_leave():
                    return None
                self._worker.enter(DATA)
                self._run(reader.any_rows(1).batch)
        finally:
            reader.close()
            self._model.baseline.put_back_buffers()
        return sums

    def _is_asked_to_leave(self) -> bool:
        """Return whether the controller has asked to leave soon. Ranks whose forward passes wait for each other decide together."""
        request = self._worker.request
        asked = request.leaves and (request.saves or request.until < inf)
        return any_rank(asked, self._layout.control) if self._equal_rounds else asked

    def _run(self, batch: Any) -> dict[str, Any]:
        self._worker.enter(SHARDED_VALIDATE if self._equal_rounds else VALIDATE)
        self._model.baseline.put_back_buffers()
        engine, batch = self._model.engine, moved(batch, self._layout.device)
        collectives = ScriptCollectives(lambda: engine.num_begun)
        with engine.evaluation_batch():
            means = self._means_of(batch)
        collectives.require_none(
            "a validation", "return the mean over the batch, and the run averages over the samples of all workers"
        )
        by_name = means if isinstance(means, Mapping) else {LOSS: means}
        found = {id(value): value for value in by_name.values() if is_metric(value)}
        states = {key: taken(metric) for key, metric in found.items()}  # a metric can have several names
        return {str(name): states.get(id(value), value) for name, value in by_name.items()}


def _checked(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a function has returned, after checking that it has a loss, and metrics and numbers alone."""
    if LOSS not in values:
        raise UsageError(
            f"the validation function returned {sorted(values)} without {LOSS!r}; return the mean loss under that name"
        )
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise UsageError(
                f"the validation function returned {name!r} as a tensor of shape {tuple(value.shape)}; return its mean over the batch"
            )
    return values


@contextmanager
def in_eval_weights(optimizer: Any) -> Iterator[None]:
    """Let an optimizer that has other weights for evaluation, as those without a schedule do, put them into the model for the block."""
    has_modes = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
    if not (has_modes and optimizer.param_groups[0].get("train_mode")):
        yield
        return
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and put each module back into its own mode afterwards.

    Both go through `train()`, because layers may work there: LoRA merges its weights in eval mode and takes them apart again.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():  # a parent comes before its children, which its train() has changed as well
            if module.training != mode:
                module.train(mode)
        for module, mode in modes.items():  # of classes whose train() keeps parts in a mode of its own
            module.training = mode
