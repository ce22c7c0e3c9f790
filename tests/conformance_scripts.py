"""Train functions that keep something of their own between steps, for the conformance suite: in `run.state()`, or where it is lost."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from conformance_models import Plain, on_numbers
from torch import Tensor, nn
from torch.func import functional_call

from undula.train.run import Run


@dataclass
class Own:
    """Values of a script, which only its validation and its log use."""

    model: nn.Module
    averages: list[Tensor] = field(default_factory=list)
    """Averages of the weights, in the order of the parameters."""
    size: float = 1.0
    """Factor of the inputs, drawn for each step."""
    mean: float = 0.0
    """Running mean of the losses."""

    def values(self) -> dict[str, Any]:
        return {"averages": [each.tolist() for each in self.averages], "size": self.size, "mean": self.mean}

    def restore(self, values: dict[str, Any], is_unfinished: bool) -> None:
        self.averages[:] = [torch.tensor(each) for each in values["averages"]]
        self.size, self.mean = values["size"], values["mean"]


def average(own: Own, loss: float) -> None:
    """Move the averages towards the weights."""
    for mean, parameter in zip(own.averages, own.model.parameters(), strict=True):
        mean.lerp_(parameter.detach(), 0.3)


def draw_size(own: Own, loss: float) -> None:
    """Draw the size of a step, as training at several scales does."""
    own.size = 0.5 + float(torch.rand(()))


def move_mean(own: Own, loss: float) -> None:
    """Move the running mean of the losses."""
    own.mean = 0.9 * own.mean + 0.1 * loss


@dataclass(frozen=True)
class Holding:
    """Train function that has values of its own."""

    after_update: Callable[[Own, float], None]
    is_kept: bool
    """Whether the values belong to the state of the run."""

    def __call__(self, run: Run) -> None:
        model = run.model(Plain())
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
        own = Own(model, [each.detach().clone() for each in model.parameters()])
        if self.is_kept:
            run.state("own", own.values, own.restore)

        def validate(batch: Any) -> Tensor:
            named = dict(zip(dict(model.named_parameters()), own.averages, strict=True))
            return functional_call(model, named, own.size * batch["x"]).square().mean()

        for step in run.steps(validate):
            for batch in step.batches():
                step.backward(on_numbers(model, batch))
            step.update()
            self.after_update(own, step.loss or 0.0)
            run.log({"mean": own.mean})


HELD = {
    "an average of the weights in a list": (average, "the loss of the validation is .* after 2 steps of a run that"),
    "a size that the validation reads": (draw_size, "the loss of the validation is .* after 2 steps of a run that"),
    "a running mean of the losses": (move_mean, "'mean', which the script logs, is .* after 2 steps of a run that"),
}
"""What a script keeps, and how the sentence begins if it does so by itself."""
