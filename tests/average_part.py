"""Part of a step with state of its own, as another package could add it: an average of the weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from feature_scripts import Loop
from torch import Tensor, nn

from undula.state.pieces import is_sharded_tensor, piece_of
from undula.train.job import Job
from undula.train.run import Run
from undula.train.step_part import StepPart, Update


class Average(StepPart):
    """Moving average of the weights."""

    def __init__(self, module: nn.Module):
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


@contextmanager
def averaging() -> Iterator[list[Average]]:
    """Add an average to each run of this process that begins in the block, and yield the averages."""
    made: list[Average] = []

    def parts(job: Job, module: nn.Module, *_: object) -> dict[str, Average]:
        made.append(Average(module))
        return {"average": made[-1]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("undula.train.trained_model.added_parts", parts)
        yield made


def averaged(run: Run, ends: Callable[[int], None]) -> None:
    """Train with an average, and log the sum of its elements at the end."""
    with averaging() as made:
        Loop()(run, ends)
        run.log({"sum": float(sum(each.double().sum() for each in made[-1].whole()))})
