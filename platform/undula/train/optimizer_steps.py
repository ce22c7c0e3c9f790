"""Steps of optimizers during a run: only those of the run's own optimizer, in `step.update`, are part of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from undula.errors import UsageError


class OptimizerSteps:
    """Refuses steps of an optimizer that the script takes by itself.

    An optimizer that the run does not know is refused when it steps in a second step of the run: what it trains differs between the ranks,
    and is lost with them. One that is made anew for each batch, for example to compute an input, is not.

    Args:
        model: Module that the script calls.
    """

    def __init__(self, model: nn.Module):
        self._parameters = set(model.parameters())
        self._others: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """Step of the run in which an optimizer that the run does not know was stepped first."""
        self._is_own = False
        self._step: int | None = None
        self._hook = register_optimizer_step_pre_hook(self._check)

    def close(self) -> None:
        self._hook.remove()

    def begin_step(self, index: int) -> None:
        self._step = index

    @contextmanager
    def own(self) -> Iterator[None]:
        """Surround the step that the run takes."""
        self._is_own = True
        try:
            yield
        finally:
            self._is_own = False

    def _check(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if self._is_own or self._step is None:
            return
        if any(parameter in self._parameters for group in optimizer.param_groups for parameter in group["params"]):
            raise UsageError(
                f"optimizer.step() of {type(optimizer).__name__} was called by the script in step {self._step}, but step.update() steps "
                "the optimizer; remove the call, and give run.optimizer() one optimizer with all parameter groups"
            )
        first = self._others.setdefault(optimizer, self._step)
        if first != self._step:
            raise UsageError(
                f"optimizer.step() of {type(optimizer).__name__} was called in steps {first} and {self._step}, but run.optimizer() did not "
                "get this optimizer, so what it trains is no part of the run; make its module a part of the model, and give "
                "run.optimizer() one optimizer with a parameter group for each"
            )
