"""Tests of the extension points: an engine, a private piece of state and a field of the step reduction are added from outside."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numbers_job import cpu_run, leave_after_next, numbers_job
from ranks import on_ranks
from torch import Tensor, nn

from undula.parallel.capabilities import DATA_PARALLEL
from undula.parallel.engines.data_parallel import DataParallelEngine
from undula.parallel.layout import Layout
from undula.plan.plan import MicroBatch
from undula.recovery.snapshot import packed, parsed
from undula.recovery.worker_state import WorkerState
from undula.state.ledger import read_ledger
from undula.state.pieces import Piece, rows_of
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train.job import Job
from undula.train.run import Run
from undula.train.step import Step
from undula.train.step_reduction import MEAN, LocalStep, StepReducer, StepTotals, reduced


class DoublingEngine(DataParallelEngine):
    """Engine that doubles gradients and halves them again."""

    capabilities = replace(DATA_PARALLEL, name="doubling")

    def reduce_gradients(self, samples: int) -> None:
        super().reduce_gradients(samples)
        for factor in (2.0, 0.5):
            for parameter in self.trainable:
                if parameter.grad is not None:
                    parameter.grad *= factor


class CountingEngine(DataParallelEngine):
    """Engine that counts the micro-batches of each virtual worker. Only the rank of a virtual worker has its row."""

    def __init__(self, layout: Layout, virtual_workers: int):
        super().__init__(layout)
        self._mine = layout.virtual_workers(virtual_workers)
        rows = torch.zeros(len(self._mine), 2, dtype=torch.int64)
        self.rows = rows_of(rows, self._mine.start, virtual_workers)

    def backward(self, loss: Tensor, weight: float, micro_batch: MicroBatch, is_last: bool) -> None:
        super().backward(loss, weight, micro_batch, is_last)
        self._pending = [*getattr(self, "_pending", []), micro_batch.virtual_worker - self._mine.start]

    def step(self, applies: bool = True) -> None:
        for place in self._pending:
            self.rows.tensor[place] += 1
        self._pending = []
        super().step(applies)

    def state(self) -> dict[str, Piece]:
        return {"counting.rows": self.rows}


@dataclass
class LocalWithWeight(LocalStep):
    weight: float = reduced(MEAN, default=0.0)


@dataclass(frozen=True)
class TotalsWithWeight(StepTotals):
    weight: float


def trained(run: Run) -> Iterator[Step]:
    """Train, and yield each step after its update."""
    model = run.model(nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr, momentum=0.9))
    for step in run.steps():
        for batch in step.batches():
            step.backward((model(batch["x"][:, None] / 48) - 1).square().mean())
        step.update()
        yield step


def _losses(rank: int, world_size: int, job: Job, is_doubling: bool) -> list[float]:
    engine = (lambda module, layout: DoublingEngine(layout)) if is_doubling else None
    for _ in trained(cpu_run(job, rank, world_size, engine=engine)):
        pass
    return read_ledger(Store(job.run_url)).steps["loss"].to_pylist()


def test_an_engine_defined_outside_the_package_trains_a_run(tmp_path: Path) -> None:
    job = numbers_job(tmp_path)
    (alone,) = on_ranks(1, _losses, job, False)
    its_own = replace(job, run_url=f"{tmp_path}/doubling")
    assert on_ranks(1, _losses, its_own, True) == [alone]


def _counts(rank: int, world_size: int, job: Job, steps: int, held: Any) -> tuple[list[list[int]], Any]:
    """Return the rows of a rank after a number of steps of its group, and the state that it leaves."""
    engines: list[CountingEngine] = []

    def counting(module: nn.Module, layout: Layout) -> CountingEngine:
        engines.append(CountingEngine(layout, 4))
        return engines[-1]

    worker = WorkerState(held=parsed(*held[rank]) if rank < len(held) else None)  # type: ignore[arg-type]
    run = cpu_run(job, rank, world_size, worker, counting)
    training = trained(run)
    for _ in range(steps - 1):
        next(training)
    leave_after_next(training, worker)
    run.hand_over()
    rows = engines[0].rows.tensor.tolist()
    dist.barrier()
    training.close()
    assert worker.held is not None
    meta, data = packed(worker.held.plan_digest, worker.held.age, worker.held.state, worker.held.rows)
    return rows, (meta, data)


def test_a_private_piece_moves_with_its_virtual_workers_and_its_loss_is_detected(tmp_path: Path) -> None:
    """Growth loses nothing. If a rank is lost with its rows, the run starts over, because no other copy of the state is complete."""
    checkpoint = CheckpointSpec(every_steps=100, snapshot_every_steps=0)
    job = replace(numbers_job(tmp_path, epochs=3), checkpoint=checkpoint)
    held: list[Any] = []
    for world_size, steps, counted in ((1, 1, 1), (2, 1, 2), (3, 1, 3), (2, 1, 1)):
        found = on_ranks(world_size, _counts, job, steps, held)
        assert [row for rows, _ in found for row in rows] == [[counted, counted]] * 4
        held = [state for _, state in found]


def _weights(rank: int, world_size: int) -> float:
    group = dist.group.WORLD
    assert group is not None
    totals = StepReducer(group, LocalWithWeight, TotalsWithWeight).reduce(LocalWithWeight(weight=rank + 1.0))
    assert isinstance(totals, TotalsWithWeight)
    return totals.weight


def test_a_new_field_of_the_step_reduction_is_reduced() -> None:
    assert on_ranks(3, _weights) == [2.0] * 3
