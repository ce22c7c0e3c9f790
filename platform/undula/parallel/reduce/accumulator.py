"""Contract of the accumulators, each of which combines the gradients of all virtual workers into the gradient of a step."""

from collections.abc import Sequence

from torch import Tensor, nn

from undula.parallel.collectives import OwnCollectives
from undula.parallel.device_clock import Mark
from undula.parallel.parameters import trainable
from undula.plan.plan import MicroBatch


class Accumulator:
    """Accumulates the gradients of this rank's micro-batches, and combines them with the gradients of the other ranks.

    A step begins with `open`. Each micro-batch calls `before_forward`, `before_backward` and, if it has samples, `add`. `finish` stores the
    gradient of the step in the parameters, or None in a parameter that has no gradient on any rank. A rank runs the micro-batches of one
    virtual worker after those of another, so a virtual worker is complete when a micro-batch of another one begins.

    This class is for models of a single rank: autograd adds up the gradients in the parameters.

    Args:
        module: Module on its device. An accumulator is made anew when other parameters require a gradient.
    """

    def __init__(self, module: nn.Module):
        self.parameters = trainable(module)
        self.ready: Mark | None = None
        """Time at which the backward pass of the step's last micro-batch began its latest collective; None if it has begun none."""
        self.collectives = OwnCollectives()
        """Collectives of torch.distributed that the passes of micro-batches have begun."""

    def open(self, work: Sequence[MicroBatch]) -> None:
        """Begin a step in which this rank runs some micro-batches. The last step may not have been finished."""

    def before_forward(self) -> None:
        """Prepare the forward pass of a micro-batch."""

    def before_backward(self, micro_batch: MicroBatch, is_last: bool) -> None:
        """Prepare the backward pass of a micro-batch, which may have no samples. `is_last` is true for the rank's last one in the step."""

    def add(self, micro_batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch, which its backward pass has left in the parameters.

        Parameters can get gradients of one memory, such as those of `a` and `b` in `a.unsqueeze(0) + b.unsqueeze(0)` (torch 2.13). What the
        next backward pass adds to one of them would be added to the other one as well, so they get memory of their own here.
        """
        known: set[int] = set()
        for parameter in self.parameters:
            gradient = parameter.grad
            if type(gradient) is Tensor and not gradient.is_sparse and (place := gradient.data_ptr()):
                if place in known:
                    parameter.grad = gradient.clone()
                known.add(place)

    def finish(self, samples: int) -> None:
        """Combine the gradients over the ranks, in a step of `samples` samples, and store the result in the parameters."""

    def close(self) -> None:
        """Remove what is attached to the parameters. Without this, the model can stay in memory although nothing uses it."""
