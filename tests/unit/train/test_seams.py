"""Tests of the extension points: an accumulator of gradients and a field of the step reduction are added from outside."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from numbers_job import cpu_run, numbers_job, trained
from ranks import on_ranks

from undula.parallel.engines.engine import Engine
from undula.parallel.reduce.accumulator import Accumulator
from undula.state.ledger import read_ledger
from undula.storage import Store
from undula.train.job import Job
from undula.train.step_reduction import MEAN, LocalStep, StepReducer, StepTotals, reduced


class Doubling(Accumulator):
    """Accumulator that doubles gradients and halves them again."""

    def finish(self, samples: int) -> None:
        super().finish(samples)
        for factor in (2.0, 0.5):
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad *= factor


@dataclass
class LocalWithWeight(LocalStep):
    weight: float = reduced(MEAN, default=0.0)


@dataclass(frozen=True)
class TotalsWithWeight(StepTotals):
    weight: float


def _losses(rank: int, world_size: int, job: Job, is_doubling: bool) -> list[float]:
    engine = (lambda module, layout: Engine(layout, Doubling)) if is_doubling else None
    for _ in trained(cpu_run(job, rank, world_size, engine=engine)):
        pass
    return read_ledger(Store(job.run_url)).steps["loss"].to_pylist()


def test_an_accumulator_defined_outside_the_package_trains_a_run(tmp_path: Path) -> None:
    job = numbers_job(tmp_path)
    (alone,) = on_ranks(1, _losses, job, False)
    its_own = replace(job, run_url=f"{tmp_path}/doubling")
    assert on_ranks(1, _losses, its_own, True) == [alone]


def _weights(rank: int, world_size: int) -> float:
    group = dist.group.WORLD
    assert group is not None
    totals = StepReducer(group, LocalWithWeight, TotalsWithWeight).reduce(LocalWithWeight(weight=rank + 1.0))
    assert isinstance(totals, TotalsWithWeight)
    return totals.weight


def test_a_new_field_of_the_step_reduction_is_reduced() -> None:
    assert on_ranks(3, _weights) == [2.0] * 3
