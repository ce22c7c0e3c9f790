"""Scripts that change weights or the optimizer's state between steps, drawn at random: which elements, how, where and when."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from feature_scripts import ROWS, Ends
from torch import Tensor, nn

from undula.state.pieces import piece_of
from undula.train.run import Run

WIDTH = 24
Where = Literal["in the loop", "in after_step", "before the batches"]
Part = Literal["all", "row", "column", "element", "last rows"]
WAYS: dict[str, Callable[[Tensor, tuple[Any, ...]], object]] = {
    "in place": lambda local, part: local[part].mul_(0.5),
    "by .data": lambda local, part: local.data[part].mul_(0.5),
    "by NumPy": lambda local, part: local.detach().numpy().__setitem__(part, local.detach().numpy()[part] * 0.5),
    "by copy_": lambda local, part: local[part].copy_(local[part] * 0.5),
    "by fill": lambda local, part: local[part].fill_(0.25),
    "by set": lambda local, part: local.__setitem__(part, 0.125),
}
"""Ways in which the elements of a part of this process's shard are changed."""
WHOLE_WAYS: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda tensor: tensor.mul_(0.5),
    "by .data": lambda tensor: tensor.data.mul_(0.5),
    "by copy_": lambda tensor: tensor.copy_(tensor * 0.5),
    "by add_": lambda tensor: tensor.add_(0.01),
}
"""Ways in which a whole tensor is changed, which is a DTensor if the model is sharded."""


class Network(nn.Module):
    """Network that counts its forward passes in its extra state, which its result depends on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.last = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.steps = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(hidden) * (1 + 0.01 * self.steps)  # type: ignore[no-any-return]

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.steps = state["steps"].clone()


@dataclass(frozen=True)
class Change:
    """What a script changes between steps."""

    where: Where
    part: Part
    way: str
    entry: str | None
    """Entry of the optimizer's state that is changed; None for the weight itself."""
    row: int
    first: int
    """First step after which it is changed."""
    every: int
    """Number of steps between two changes."""
    counts: bool
    """Whether the script also counts steps in the extra state of the model."""
    has_hook: bool
    """Whether the optimizer has a hook of the script, so that updates are not recorded."""

    def __call__(self, run: Run, ends: Ends) -> None:
        """Train."""
        network = Network()
        model = run.model(network)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if self.has_hook:
            optimizer.register_step_post_hook(lambda *_: None)
        run.optimizer(optimizer)

        def change(done: int, *_: object) -> None:
            if done >= self.first and (done - self.first) % self.every == 0:
                self._change(network, optimizer)
            if self.counts:
                network.steps.fill_(done)

        in_after_step = self.where == "in after_step"
        for step in run.steps(after_step=change if in_after_step else None):
            if self.where == "before the batches":
                change(step.index)
            for batch in step.batches():
                step.backward((model(batch["x"][:, None] / ROWS) - 1).square().mean())
            ends(step.index)
            step.update()
            if self.where == "in the loop":
                change(step.index + 1)

    def _change(self, network: Network, optimizer: torch.optim.Optimizer) -> None:
        weight = network.middle.weight
        with torch.no_grad():
            tensor = weight if self.entry is None else optimizer.state[weight][self.entry]
            if self.part == "all":
                WHOLE_WAYS[self.way](tensor)
                return
            piece = piece_of(tensor)
            begin, end = piece.offsets[0], piece.offsets[0] + piece.tensor.shape[0]
            for part in self._parts(begin, end):
                WAYS[self.way](piece.tensor, part)

    def _parts(self, begin: int, end: int) -> Iterator[tuple[Any, ...]]:
        """Yield the indices of the elements in the rows of a shard."""
        if self.part == "column":
            yield slice(None), self.row
        elif self.part == "last rows":
            yield slice(max(WIDTH - 2 - begin, 0), max(end - begin, 0)), slice(None)
        elif begin <= self.row < end:
            yield self.row - begin, (slice(None) if self.part == "row" else WIDTH // 3)


def drawn_change(number: int) -> Change:
    """Return the change of this number."""
    draw = random.Random(number)
    part: Part = draw.choice(["all", "row", "column", "element", "last rows"])
    return Change(
        where=draw.choice(["in the loop", "in after_step"]),
        part=part,
        way=draw.choice(list(WHOLE_WAYS if part == "all" else WAYS)),
        entry=draw.choice([None, None, "exp_avg", "exp_avg_sq"]),
        row=draw.randrange(WIDTH),
        first=draw.randrange(1, 6),
        every=draw.choice([1, 1, 2, 3]),
        counts=draw.random() < 0.5,
        has_hook=draw.random() < 0.25,
    )
