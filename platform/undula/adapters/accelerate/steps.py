"""Steps of a run as a loop written for Accelerate goes through them: batch by batch, where the optimizer's step ends the last one."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from undula.errors import UsageError
from undula.train.measurement import averaged
from undula.train.run import Run
from undula.train.step import Step


class UnknownNorm(Tensor):
    """Norm of the gradient for a batch that is not known to be the last one of its step, and for which it may not be used."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UsageError(
            "what accelerator.clip_grad_norm_() returned is used for each batch, but the norm is known with the last batch of a step "
            "only; call it and use it `if accelerator.sync_gradients`"
        )


class Steps:
    """Steps of a run.

    Args:
        run: The run, to which the script has given all that it prepared.
        model: Model of the script.
        needs_accumulate: Whether the script accumulates gradients, and must therefore use `accelerator.accumulate`.
        has_scheduler: Whether the script has a scheduler, which it must step with the optimizer.
        batch_of: Function that returns a micro-batch of a step.
        undone: Function that returns a context which undoes what a batch changes outside of a step.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        needs_accumulate: bool,
        has_scheduler: bool,
        batch_of: Callable[[int], Any],
        undone: Callable[[], AbstractContextManager[None]],
    ):
        self.done = run.restore()
        """Number of committed steps."""
        self.step: Step | None = None
        """Step between its first batch and its update; None otherwise."""
        self.is_accumulating = self.has_accumulated = False
        """Whether the loop is inside of `accelerator.accumulate`, and whether it was for the current batch."""
        self.has_advanced = False
        """Whether the script has stepped its scheduler since the last step began."""
        self.was_applied = True
        """Whether the optimizer took the last step."""
        self._model = model
        self._samples = 0
        """Number of samples in the current batch."""
        self._is_after = False
        """Whether the script has called optimizer.step() for the current batch."""
        self._has_gradient = False
        """Whether the backward pass of the current batch has run."""
        self._omits_step = False
        """Whether the script has left out optimizer.step() for a batch."""
        self._has_asked = False
        """Whether the script has read sync_gradients for the current batch."""
        self._late: dict[str, tuple[float, int]] = {}
        """Sums of the values that the script has logged after optimizer.step() in this step, weighted by samples, and the weights."""
        self._run = run
        self._needs_accumulate = needs_accumulate
        self._has_scheduler = has_scheduler
        self._batch_of, self._undone = batch_of, undone
        self._repeats = self._is_repeating = False
        """Whether the next or the current batch is the last one of an epoch once more, which has no effect."""
        self._plan = run.plan
        self._steps = run.steps()
        self._batches: Iterator[Any] = iter(())

    @property
    def sync_gradients(self) -> bool:
        self._has_asked = True
        return self.step is None or self.step.is_last

    @property
    def is_in_batch(self) -> bool:
        """Whether the script works on a batch of the training, also after optimizer.step()."""
        return self.step is not None or self._is_after or self._is_repeating

    def epochs(self, is_unfinished: bool) -> range:
        """Return the epochs that are left.

        Args:
            is_unfinished: Whether the script's work after the last committed step must be repeated.
        """
        per_epoch = self._plan.steps_per_epoch
        last = -(-self._run.last_step // per_epoch)
        current = max(self.done - 1, 0) // per_epoch
        if self.done != self._end_of(current):
            return range(self.done // per_epoch, last)
        self._repeats = is_unfinished
        return range(current + (not is_unfinished), last)

    def _end_of(self, epoch: int) -> int:
        return min((epoch + 1) * self._plan.steps_per_epoch, self._run.last_step)

    def require_end_of(self, epoch: int) -> None:
        """Check that an epoch has ended.

        Raises:
            UsageError: It has not.
        """
        if self.done < self._end_of(epoch):
            raise UsageError(
                f"the loop over the training DataLoader ended after step {self.done - 1}, before the end of epoch {epoch}; iterate over it "
                "once in each epoch, to its end, and set plan.max_steps, or leave the loop over epochs, for a shorter training (a script "
                "that counts steps does it `if accelerator.sync_gradients`, because a worker can have several batches in a step)"
            )
        self._log_late()

    def of_epoch(self, epoch: int) -> Iterator[Any]:
        """Yield the micro-batches of this rank in the steps of an epoch that are left, or otherwise the last one once more.

        Raises:
            UsageError: The script does not end each step with its optimizer, or does not step its scheduler there.
        """
        if self._repeats:
            self._repeats, self._is_repeating = False, True
            try:
                with self._undone():
                    yield self._batch_of(self.done - 1)
            finally:
                self._is_repeating = False
        while self.done < self._end_of(epoch):
            self.step = step = next(self._steps)
            self.has_advanced = False
            self._batches = step.batches()
            for batch in self._batches:
                assert step.micro_batch is not None
                self._samples = step.micro_batch.samples
                self._is_after = self._has_gradient = self._has_asked = self.has_accumulated = False
                yield batch
                self._omits_step |= not self._is_after
                if not (self._is_after or (self._has_asked and self.has_accumulated)):
                    raise UsageError(_without_update(step.index))
                step.keep_gradients()  # a loop may call model.zero_grad() after optimizer.step() of each batch
            if not step.updated:
                raise UsageError(_without_update(step.index))
            if self._has_scheduler and not self.has_advanced:
                raise UsageError(
                    f"step {self.done - 1} ended without scheduler.step(); call it after optimizer.step() for each batch, with a scheduler "
                    "that counts steps and not epochs"
                )
            self._log_late()

    def stop(self, epoch: int) -> None:
        """End the run after an epoch, because the script has left its loop over epochs.

        Raises:
            UsageError: The epoch has not ended.
        """
        self.require_end_of(epoch)
        if self.done < self._run.last_step:
            self._run.stop("the script left its loop over epochs")
        self.end()

    def end(self) -> None:
        """End the run after its last epoch."""
        for _ in self._steps:
            raise AssertionError("the plan has more steps than its epochs")

    def open(self, call: str) -> Step:
        """Return the open step.

        Raises:
            UsageError: There is none.
        """
        if self.step is None:
            raise UsageError(
                f"{call} was called outside of a step; call it once for each batch of the training DataLoader, which is the first one that "
                "accelerator.prepare() gets"
            )
        return self.step

    def log(self, values: Mapping[str, Any]) -> None:
        """Record numbers in the open step, or as an event if it may be committed.

        Raises:
            UsageError: A value is no number.
        """
        for name, value in values.items():
            if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
                raise UsageError(f"accelerator.log() got {name!r} of type {type(value).__name__}; log numbers")
        if self._is_repeating:
            return
        if not self._is_after and self.step is not None:
            self.step.log(**values)
        elif not self._is_after:
            self._run.log(values)
        elif self._samples:  # a value of no samples may be NaN, even if it is multiplied by 0
            for name, value in values.items():
                total, weight = self._late.get(name, (0.0, 0))
                self._late[name] = (
                    total + averaged("accelerator.log()", name, value) * self._samples,
                    weight + self._samples,
                )

    def _log_late(self) -> None:
        """Record what the script has logged after optimizer.step(), once it has worked on all batches of the step."""
        late, self._late, self._is_after = self._late, {}, False
        if late:
            self._run.log({name: total / weight for name, (total, weight) in late.items()})

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient of the current batch.

        Raises:
            UsageError: It was computed before.
        """
        if self._is_repeating:
            return
        step = self.open("accelerator.backward()")
        if self._has_gradient:
            raise UsageError(
                "accelerator.backward() was called twice for a batch; add up the losses, and call it once for their sum"
            )
        self._has_gradient = True
        step.backward(loss)

    def reduce(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Reduce and clip the gradient after the last batch of the step; do nothing before.

        Returns:
            Norm of the gradient. If the script has not read sync_gradients for the batch, it may not be used.

        Raises:
            UsageError: The norm is another than the Euclidean one of all parameters.
        """
        clipped = {id(tensor) for tensor in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        trained = {id(parameter) for parameter in self._model.parameters() if parameter.requires_grad}
        if not isinstance(max_norm, int | float | Tensor):
            raise UsageError(
                f"accelerator.clip_grad_norm_() got max_norm={max_norm!r}; pass a number, such as float('inf') to measure the norm only, "
                "or remove the call; gradient.max_norm in the job's YAML applies then"
            )
        if norm_type != 2 or trained - clipped:
            raise UsageError(
                "accelerator.clip_grad_norm_() clips the Euclidean norm of all parameters; pass these, without norm_type="
            )
        if self._is_repeating:
            return torch.tensor(math.nan, device=self._run.device)
        step = self.open("accelerator.clip_grad_norm_()")
        norm = torch.zeros((), device=self._run.device)
        if step.is_last:
            next(self._batches, None)  # ends the loop over the batches of the step
            norm = step.reduce(max_norm)
        # A worker with one batch in each step has a norm for each, but it may be another one in the next group.
        return norm if step.is_last and self._has_asked else norm.as_subclass(UnknownNorm)

    def update(self) -> None:
        """Commit the step after its last batch; do nothing before."""
        if self._is_repeating:
            return
        step = self.open("optimizer.step()")
        if self._needs_accumulate and not self.is_accumulating:
            raise UsageError(
                "Accelerator has gradient_accumulation_steps, but optimizer.step() was called outside of accelerator.accumulate(); put "
                "the work on a batch into `with accelerator.accumulate(model)`"
            )
        self._is_after = True
        if not step.is_last:
            if self._omits_step:  # by sync_gradients, the optimizer's step would be left out here as well
                raise UsageError(_without_update(step.index))
            return
        next(self._batches, None)
        step.update()
        self.done, self.was_applied, self.step = step.index + step.merged_steps, step.applied, None


def _without_update(index: int) -> str:
    return (
        f"step {index} has a batch without optimizer.step(); call it for each batch, and leave accumulation "
        "to Accelerator(gradient_accumulation_steps=...) and `with accelerator.accumulate(model)`, without a division of the loss"
    )
