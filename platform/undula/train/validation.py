"""Validation on a fixed set of samples, which virtual workers share as in training, so that its result is equal at any world size.

A loss may draw random numbers, for example to mask tokens. They are keyed like those of training, but not by the step of the run.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from undula.data.nested import with_tensors
from undula.data.reader import SampleReader
from undula.errors import UsageError
from undula.parallel.collectives import any_rank, begun_collectives, require_begun_collectives
from undula.parallel.layout import Layout
from undula.parallel.random_state import kept_random_state
from undula.plan.plan import Plan
from undula.recovery.progress import DATA, SHARDED_VALIDATE, VALIDATE
from undula.recovery.worker_state import WorkerState
from undula.state.goals import LOSS
from undula.train.job import Job
from undula.train.randomness import seed_validation

ValidationFunction = Callable[[Any], Tensor | Mapping[str, Tensor | float]]
"""Function that returns the mean loss over a batch's samples, as a scalar tensor, or several means by name, of which one is "loss"."""


Sums = tuple[dict[str, list[float]], int]
"""Sums of each mean over the samples of each micro-batch, by name, and the number of all these samples."""


class Validation:
    """Validates the model on one rank.

    Args:
        model: Module that the script calls.
        optimizer: Optimizer of the run.
        function: Function that returns the means of a batch.
        job: Settings of the job.
        plan: Plan of a validation.
        stream_of: Function that returns the rank's samples of a validation.
        layout: Layout of the worker group.
        worker: State of this process, to which the phases and the requests of the controller belong.
        put_back_buffers: Function that undoes changes of the model's buffers. It is called before each batch and at the end, because the
            number of batches of a rank depends on the number of ranks.
        equal_rounds: Whether all ranks must run the same number of micro-batches, because forward passes contain collectives.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        function: ValidationFunction,
        job: Job,
        plan: Plan,
        stream_of: Callable[[], SampleReader],
        layout: Layout,
        worker: WorkerState,
        put_back_buffers: Callable[[], None],
        equal_rounds: bool,
    ):
        self._model = model
        self._optimizer = optimizer
        self._means_of = function
        self._job = job
        self._plan = plan
        self._stream_of = stream_of
        self._layout = layout
        self._worker = worker
        self._put_back_buffers = put_back_buffers
        self._phase = SHARDED_VALIDATE if equal_rounds else VALIDATE
        self._equal_rounds = equal_rounds
        self._rounds = layout.rounds(self._plan, range(self._plan.total_steps)) if equal_rounds else 0

    def sums(self, can_end_early: bool = False) -> Sums | None:
        """Return the sums of each mean over the samples of each micro-batch of this rank, by name, and the number of all these samples.

        Args:
            can_end_early: Whether to end early if the ranks are asked to leave by some time.

        Returns:
            The sums and the number; None if the validation has ended early.

        Raises:
            UsageError: The function did not return means, or other ones than for a batch before, or has begun a collective.
        """
        if can_end_early and self._is_asked_to_leave():
            return None
        with kept_random_state(), torch.no_grad(), in_eval_mode(self._model), in_eval_weights(self._optimizer):
            return self._sums(can_end_early)

    def _sums(self, can_end_early: bool) -> Sums | None:
        virtual_workers = self._layout.virtual_workers(self._job.plan.virtual_workers)
        stream = self._stream_of()
        steps = range(self._plan.total_steps)
        sums: dict[str, list[float]] = {}
        batches = samples = 0
        try:
            for each in self._plan.work(steps, virtual_workers):
                if can_end_early and self._is_asked_to_leave():
                    return None
                self._worker.enter(DATA)
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
                if can_end_early and self._is_asked_to_leave():
                    return None
                self._worker.enter(DATA)
                self._run(stream.any_rows(1).batch)
        finally:
            stream.close()
            self._put_back_buffers()
        return (sums, samples) if self._layout.leads_cell else ({}, 0)

    def _is_asked_to_leave(self) -> bool:
        """Return whether the controller has asked to leave soon. Ranks whose forward passes wait for each other decide together."""
        request = self._worker.request
        asked = request.leaves and (request.saves or request.until < inf)
        return any_rank(asked, self._layout.control) if self._equal_rounds else asked

    def _run(self, batch: Any) -> Mapping[str, Tensor | float]:
        self._worker.enter(self._phase)
        self._put_back_buffers()
        device, begun = self._layout.device, begun_collectives()
        found = self._means_of(with_tensors(batch, lambda tensor: tensor.to(device)))
        if not self._equal_rounds:
            require_begun_collectives(
                begun,
                "a validation",
                "return the mean over the batch, and the run averages over the samples of all workers",
            )
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
