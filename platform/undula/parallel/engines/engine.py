"""Engine that trains a module of which each rank has the whole."""

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from operator import is_

import torch
from torch import Tensor, nn

from undula.errors import UsageError
from undula.parallel.capabilities import DATA_PARALLEL, Capabilities, Feature, refusal
from undula.parallel.collectives import broadcast_from_rank_0
from undula.parallel.device_clock import Mark
from undula.parallel.layout import Layout
from undula.parallel.precision import Autocast, unscale
from undula.parallel.reduce.accumulator import (
    Accumulator,
    GradientHooks,
    ShowGradient,
    clip_gradients,
    features_of_model,
    gradient_norm,
    parameters_of,
)
from undula.parallel.spec import GradientSpec
from undula.plan.plan import MicroBatch


class Engine:
    """Places a model, runs its backward passes, combines the gradients of all ranks, and steps the optimizer.

    `place` and `prepare` are called once. Each step begins with `begin_step`, calls `before_forward` and `backward` for each micro-batch,
    and ends with `finish_gradients` and `step`. The weight of a micro-batch's loss is the micro-batch's share of the step's samples, so
    that the plain sum over micro-batches and ranks is the mean over the step for any assignment of virtual workers.

    If a parameter has no gradient on any rank, its gradient is None after `finish_gradients`, so that no optimizer changes the parameter,
    whatever the number of ranks.

    Args:
        layout: Layout of the worker group.
        accumulate: Function that makes the accumulator of a module's gradients; by default that of a single rank.
    """

    capabilities: Capabilities = DATA_PARALLEL
    settings: Set[Feature] = frozenset()
    """Features that the job's settings require. The model may require others once the script has unfrozen parameters."""
    keeps_gathered = False
    """Whether what a forward pass without a backward pass has gathered of a sharded model is kept, because another one follows at once."""
    has_same_bits = True
    """Whether a model has the same bits at any number of ranks, as far as the engine knows its optimizer."""
    gradient = GradientSpec()
    """The job's settings for the gradient of a step."""

    def __init__(self, layout: Layout, accumulate: Callable[[nn.Module], Accumulator] = Accumulator):
        self.layout = layout
        self.parameters: list[nn.Parameter] = []
        self._accumulate = accumulate
        self._accumulator = Accumulator(nn.Module())
        self._autocast: Autocast | None = None
        self._gradient_hooks = GradientHooks()

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Parameters that require a gradient: the same list until these change."""
        return self._accumulator.parameters

    @property
    def gradients_ready(self) -> Mark | None:
        """Time from which only the reduction of the step remained; None if the reduction does not overlap with the backward pass."""
        return self._accumulator.ready

    @property
    def num_begun(self) -> int:
        """Number of collectives of torch.distributed that the passes of micro-batches have begun since parameters were last frozen."""
        return self._accumulator.collectives.num_begun

    def place(self, module: nn.Module) -> nn.Module:
        """Move a module to the device, and copy the weights of rank 0 to every rank.

        Returns:
            The module that the script calls.
        """
        module = module.to(self.layout.device)
        broadcast_from_rank_0([*module.parameters(), *module.buffers()], self.layout.everyone)
        self._attach(module)
        return module

    def _attach(self, module: nn.Module) -> None:
        """Make an accumulator for the parameters of a module that require a gradient now."""
        self.module = module
        self.parameters = parameters_of(module)
        self._accumulator.close()
        self._accumulator = Accumulator(module)  # frees the memory of the former one before the next one takes its own
        self._accumulator = self._accumulate(module)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Compute the model's forward and backward pass in a 16-bit dtype. Called after `place`. Outputs and gradients remain fp32."""
        self._autocast = Autocast(self.module, self.layout.device, dtype)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Accept the module that `place` returned, and the optimizer that `step` is to step."""
        self.optimizer = optimizer

    def begin_step(self, work: Sequence[MicroBatch]) -> None:
        """Begin a step in which this rank runs some micro-batches.

        Raises:
            UsageError: The script has unfrozen or added parameters that cannot be trained with the job's settings.
        """
        self.parameters = parameters_of(self.module)
        trainable = [parameter for parameter in self.parameters if parameter.requires_grad]
        if len(trainable) != len(self.trainable) or not all(map(is_, trainable, self.trainable)):
            if problem := refusal(self.settings | features_of_model(self.module)):
                raise UsageError(problem)
            self._attach(self.module)
        self._accumulator.open(work)

    def watch_gradients(self, show: ShowGradient) -> None:
        """Show a function each gradient of a micro-batch as its backward pass computes it, in this step and possibly in later ones."""
        self._gradient_hooks.attach(self.trainable, show)

    def evaluation_batch(self) -> AbstractContextManager[None]:
        """Return a context for the forward passes of one batch that no backward pass follows. All ranks must enter it together."""
        return nullcontext()

    def before_forward(self, is_last: bool) -> None:
        """Prepare the forward pass of a micro-batch. `is_last` is true for the last micro-batch of the step on this rank."""
        self._accumulator.before_forward()

    def backward(self, loss: Tensor, weight: float, micro_batch: MicroBatch, is_last: bool) -> None:
        """Compute the gradients of a micro-batch and add them to the gradients of the step.

        Args:
            loss: Mean loss over the micro-batch's samples, a scalar.
            weight: Factor on the loss.
            micro_batch: Micro-batch of the loss. It has no samples if this rank has no share of a short step and only runs the model
                because the other ranks do.
            is_last: Whether it is the last micro-batch of the step on this rank.
        """
        self._accumulator.before_backward(micro_batch, is_last)
        # A gradient of zero would differ from none: with momentum, it would move a parameter that no sample uses.
        if micro_batch.samples or self.capabilities.equal_rounds:
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        if micro_batch.samples:
            self._accumulator.add(micro_batch)

    def finish_gradients(
        self, samples: int, *, max_norm: float | None = None, loss_scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Reduce the gradients of a step of `samples` samples, and clip them.

        Args:
            samples: Number of samples in the step.
            max_norm: Maximum norm of the gradient, which a script can set for each step; by default that of the job, if it has one.
            loss_scale: Factor on the losses of the step, by which the gradients are divided again; None for none.

        Returns:
            Norm of the gradient before clipping, from which the noise scale is computed, and whether the step must be skipped because a
            scaled gradient overflowed on this rank. Both are scalars on the device.
        """
        self._accumulator.finish(samples)
        overflows = torch.zeros((), device="cpu") if loss_scale is None else unscale(self.parameters, loss_scale)
        norm = gradient_norm(self.parameters)
        limit = self.gradient.max_norm if max_norm is None else max_norm
        if limit is not None:
            clip_gradients(self.parameters, limit, norm)
        return norm, overflows

    def step(self, applies: bool = True) -> None:
        """Step the optimizer, unless the step is skipped, and free the gradients."""
        if applies:
            self.optimizer.step()
        self.free_gradients()

    def reshard(self) -> None:
        """Free what forward passes without a backward pass, such as those of a validation, have gathered of a sharded model."""

    def changed_shards(self) -> int:
        """Return 16 bits of a digest of what the script has called to change shards of the model or its optimizer since the last step."""
        return 0

    def free_gradients(self) -> None:
        """Free all gradients, including the gradients of parameters that the optimizer does not have."""
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        """Remove what the engine has attached to the model. Without this, the model can stay in memory although nothing uses it."""
        self._accumulator.close()
        if self._autocast:
            self._autocast.remove()
