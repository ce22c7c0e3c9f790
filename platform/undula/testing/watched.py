"""A script's train function whose run is watched: at its step boundaries, and in the batches of its steps."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from undula.errors import ConformanceError
from undula.state.model_state import bare_module
from undula.testing.records import Record, first_difference, record_of, record_of_copy, record_of_parts, stored_part
from undula.train.plain_loop import RecordedStep, copied, parameters_of
from undula.train.run import Run
from undula.train.script_state import AfterStep
from undula.train.step import Step
from undula.train.validation import ValidationFunction

Train: TypeAlias = Callable[[Run], None]
Visit: TypeAlias = Callable[[int, "WatchedRun"], None]
"""Called with the number of steps done, and the run."""


class GroupEnded(BaseException):
    """Ends a train function within a step. A script's `except Exception` does not catch it."""


@dataclass(frozen=True)
class Watched:
    """Train function whose step boundaries are visited."""

    train: Train
    visit: Visit | None = None
    steps: list[RecordedStep] | None = None
    """List to which the steps are recorded; None to record nothing."""
    ends_in: int | None = None
    """Step after whose first micro-batch the group ends."""

    def __call__(self, run: Run) -> None:
        self.train(WatchedRun(run, self))  # type: ignore[arg-type]


class WatchedRun:
    """A run whose step boundaries are visited."""

    def __init__(self, run: Run, by: Watched):
        self._run = run
        self._by = by

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def model(self, module: nn.Module) -> nn.Module:
        self._model = self._run.model(module)
        return self._model

    def optimizer(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> torch.optim.Optimizer:
        self._optimizer = self._run.optimizer(optimizer, scheduler)
        if self._by.steps is not None:
            self._optimizer.register_step_pre_hook(self._record_settings)
        return self._optimizer

    def steps(self, validate: ValidationFunction | None = None, after_step: AfterStep | None = None) -> Iterator[Step]:
        validate, after_step = self._recorded(validate, after_step)
        for step in self._run.steps(validate, after_step):
            self._visit(step.index)
            if self._by.steps is not None:
                self._by.steps.append(RecordedStep(step.index, step.samples, step.lr))
            step.batches = partial(self._batches, step, step.batches)  # type: ignore[method-assign]
            yield step
        self._visit(self._run.plan.total_steps)

    def _recorded(
        self, validate: ValidationFunction | None, after_step: AfterStep | None
    ) -> tuple[ValidationFunction | None, AfterStep | None]:
        """Return functions of the script that also record what they get."""
        if (steps := self._by.steps) is None:
            return validate, after_step
        steps.append(RecordedStep(-1, 0, 0.0))

        def recorded_validate(batch: Any) -> Any:
            assert validate is not None
            steps[-1].validated.append(copied(batch))
            return validate(batch)

        def recorded_after_step(done: int, means: Mapping[str, float] | None) -> None:
            assert after_step is not None
            steps[-1].means = means
            after_step(done, means)

        return validate and recorded_validate, after_step and recorded_after_step

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the model."""
        return parameters_of(bare_module(self._model))

    def record(self, is_whole: bool = False) -> Record:
        """Return a record of the state of this rank. With `is_whole`, all ranks must call this, to gather what they have in shards."""
        return {**record_of(self._model, self._optimizer, is_whole), **self._of_parts}

    def _visit(self, done: int) -> None:
        if self._by.visit is None:
            return
        copies = self._run.copies()
        of_parts = {purpose: record_of_parts(copy) for purpose, copy in copies.items()}
        self._of_parts = next(iter(of_parts.values()))
        self._by.visit(done, self)
        live = {**stored_part(record_of(self._model, self._optimizer)), **self._of_parts}
        for purpose, copy in copies.items():
            if difference := first_difference({**record_of_copy(copy), **of_parts[purpose]}, live):
                raise ConformanceError(f"{difference} in {purpose}, after {done} steps")

    def _batches(self, step: Step, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        for batch in batches():
            if self._by.steps is not None:
                self._by.steps[-1].add_batch(step.micro_batch, batch)
            yield batch
            if self._by.ends_in == step.index:
                raise GroupEnded

    def _record_settings(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._by.steps:  # a script may let the optimizer make its state before the first step
            self._by.steps[-1].add_settings(optimizer)
