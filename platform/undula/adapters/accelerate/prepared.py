"""Optimizer and scheduler as a script sees them: it steps them batch by batch, and the run at the end of each step."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler

from undula.adapters.accelerate.steps import Steps
from undula.errors import UsageError


class PreparedOptimizer(torch.optim.Optimizer):
    """Optimizer that `prepare` returns. Its step ends the step of the run, which steps the script's optimizer.

    Args:
        optimizer: Optimizer of the script.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        # As in Accelerate, the initialization of torch's class is skipped: the groups and the state are those of the optimizer inside.
        self.optimizer = optimizer
        self.steps: Steps | None = None
        """Steps of the run; None before the training begins."""

    @property
    def step_was_skipped(self) -> bool:
        return self.steps is not None and not self.steps.was_applied

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise UsageError("optimizer.load_state_dict() was called, but the run restores its optimizer itself; remove it")

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise UsageError("optimizer.step() got a closure; use an optimizer that does not compute the loss again")
        if self.steps is None:
            raise UsageError("optimizer.step() was called outside of `for epoch in accelerator.epochs(n)`")
        self.steps.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, because the run frees the gradient of a step when the optimizer has taken it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


class PreparedScheduler:
    """Scheduler that `prepare` returns. The run advances it when it commits a step, so that both are always at the same step.

    Args:
        scheduler: Scheduler of the script.
        times: Number of its steps in a step of the run. Accelerate advances schedulers once for each process.
    """

    def __init__(self, scheduler: LRScheduler, times: int):
        self.scheduler = scheduler
        self.steps: Steps | None = None
        """Steps of the run; None before the training begins."""
        self._times = times

    def step(self) -> None:
        """Record that the script advances the scheduler in each step."""
        if self.steps is None:
            raise UsageError("scheduler.step() was called outside of `for epoch in accelerator.epochs(n)`")
        self.steps.has_advanced = True

    def of_run(self) -> LRScheduler:
        """Return the scheduler as the run sees it, with the methods that a run uses."""
        methods = {name: getattr(self.scheduler, name) for name in ("optimizer", "state_dict", "load_state_dict")}
        return cast(LRScheduler, SimpleNamespace(**methods, step=self._advance))

    def _advance(self) -> None:
        """Advance the scheduler after a step. As with Accelerate, a one-cycle scheduler stays at its end."""
        for _ in range(self._times):
            if getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", float("inf")):
                self.scheduler.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)
