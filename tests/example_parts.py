"""Parts of a step with state of their own, as other packages could add them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from feature_scripts import Loop
from torch import Tensor, nn

from undula import extensions
from undula.parallel.layout import Layout
from undula.state.pieces import Rows, is_sharded_tensor, piece_of
from undula.train.job import Job
from undula.train.run import Run
from undula.train.step_part import GROUP, StepPart, Update

Part = TypeVar("Part", bound=StepPart)


class Average(StepPart):
    """Moving average of the weights."""

    def __init__(self, module: nn.Module, *_: object):
        self._weights = dict(module.named_parameters())
        self.averages = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.num_steps = 0

    def updated(self, update: Update) -> dict[str, float]:
        assert update.applies
        self.num_steps += 1
        for name, average in self.averages.items():
            average.lerp_(self._weights[name].detach(), 0.25)
        return {"num_averaged": float(self.num_steps)}

    def state(self) -> dict[str, Any]:
        pieces = {f"average.{name}": piece_of(average) for name, average in self.averages.items()}
        return {**pieces, "average.num_steps": self.num_steps}

    def restore(self, values: Mapping[str, Any]) -> None:
        self.num_steps = values.get("average.num_steps", 0)

    def whole(self) -> list[Tensor]:
        """Return the averages. All ranks call this."""
        return [each.full_tensor() if is_sharded_tensor(each) else each for each in self.averages.values()]  # type: ignore[attr-defined]


class Sums(StepPart):
    """Sums over the micro-batches of each virtual worker, to which a step that is lost or taken twice gives other values."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout, virtual_workers: int):
        self._layout, self._count, self._index = layout, virtual_workers, 0
        self._sums = {number: torch.zeros(2, device="cpu") for number in layout.virtual_workers(virtual_workers)}
        self._samples = dict.fromkeys(self._sums, 0)

    def begin_step(self, index: int, merged_steps: int) -> None:
        self._index, self._samples = index, dict.fromkeys(self._sums, 0)

    def end_micro_batch(self, samples: int, virtual_worker: int) -> None:
        if samples:
            self._samples[virtual_worker] += samples

    def updated(self, update: Update) -> dict[str, float]:
        for number, row in self._sums.items():
            row.mul_(1.5).add_((self._index + 1) * (number + 1) * self._samples[number])
        ranks: list[Any] = [None] * self._layout.world_size
        dist.all_gather_object(
            ranks, {number: row.tolist() for number, row in self._sums.items()}, group=self._layout.control
        )
        return {f"sums.{number}": sum(row) for rank in ranks for number, row in rank.items()}

    def state(self) -> dict[str, Any]:
        return {"sums.rows": Rows(self._sums, self._count)}


@contextmanager
def adding(name: str, make: Callable[..., Part]) -> Iterator[list[Part]]:
    """Add a part to each run of this process that begins in the block, and yield the parts."""
    made: list[Part] = []

    def parts(job: Job, *given: Any) -> dict[str, Part]:
        made.append(make(*given))
        return {name: made[-1]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("undula.train.trained_model.added_parts", parts)
        of_others = extensions.names
        patch.setattr(extensions, "names", lambda group, own: [name] if group == GROUP else of_others(group, own))
        yield made


def averaged(run: Run, ends: Callable[[int], None]) -> None:
    """Train with an average, and log the sum of its elements at the end."""
    with adding("average", Average) as made:
        Loop()(run, ends)
        run.log({"sum": float(sum(each.double().sum() for each in made[-1].whole()))})


def summed(run: Run, ends: Callable[[int], None]) -> None:
    """Train with sums of each virtual worker, which each step logs."""
    with adding("sums", Sums):
        Loop()(run, ends)
