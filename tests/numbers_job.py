"""Job over a few numbers, for tests of the training loop without Ray."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from undula.data.prepare.write import write_shards
from undula.data.spec import DataSpec, ValidationSpec
from undula.errors import UsageError
from undula.parallel.engines.select import MakeEngine
from undula.parallel.layout import join_layout
from undula.parallel.spec import GradientSpec
from undula.plan.plan import PlanSpec
from undula.plan.schedule import ScheduleSpec
from undula.recovery.offers import Leavers
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state.events import WarningEvent
from undula.state.ledger import events_of, read_ledger
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train.job import Job
from undula.train.run import Run
from undula.train.session import GroupSession
from undula.train.setup import RunSetup
from undula.train.single_process import local_world
from undula.train.step import Step

CPU = torch.device("cpu")


def numbers_job(folder: Path, **plan: Any) -> Job:
    """Write a data set of 48 samples `x` and return a job that trains on it."""
    write_numbers(folder, 48)
    return Job(
        name="numbers",
        run_url=str(folder / "run"),
        # A new id keeps the run from using a snapshot of an earlier test in the memory of this machine.
        run_id=token_hex(8),
        data=DataSpec(train=str(folder / "data")),
        plan=PlanSpec(**{"global_batch": 12, "virtual_workers": 4, **plan}),
        deterministic=False,
        schedule=ScheduleSpec(base_lr=0.1),
        gradient=GradientSpec(),
        validation=ValidationSpec(),
        checkpoint=CheckpointSpec(every_steps=2),
        config={},
    )


def network(is_sharded: bool = False) -> nn.Module:
    """Return a small network, whose first layer and the rest are sharded on demand."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(1, 7), nn.Tanh(), nn.Linear(7, 1))
    if is_sharded:
        fully_shard(module[0])
        fully_shard(module)
    return module


def write_numbers(folder: Path, rows: int) -> None:
    table = pa.table({"x": np.arange(rows, dtype=np.float32)})
    write_shards(Store(str(folder / "data")), [table], table.schema, rows, num_shards=2, row_group_bytes=64)


def cpu_run(
    job: Job,
    rank: int = 0,
    world_size: int = 1,
    worker: WorkerState | None = None,
    engine: MakeEngine | None = None,
    device: torch.device = CPU,
    leavers: Leavers | None = None,
) -> Run:
    """Return a run of this process, by default on its CPU, with all ranks on the same node."""
    layout = join_layout(rank, world_size, device, local_rank=rank)
    setup = RunSetup.of(job, layout, worker or WorkerState(), lambda message: None, leavers=leavers)
    return Run(GroupSession(setup, engine))


def leave_after_next(steps: Iterator[Any], worker: WorkerState) -> None:
    """Let a group, whose steps a test yields after their updates, commit one more step and leave after it."""
    worker.request = Request(leaves=True, until=0.0)
    with suppress(LeaveGroup):
        next(steps)
        next(steps)
    worker.request = Request()


def begin(run: Run, module: nn.Module | None = None) -> Any:
    """Give a run a model, by default of one layer, and an optimizer; return the model."""
    model = run.model(nn.Linear(1, 1) if module is None else module)
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    return model


def run_batches(step: Step, model: nn.Module) -> None:
    """Run the forward and backward passes of a step."""
    for batch in step.batches():
        step.backward(model(batch["x"][:, None] / 48).square().mean())


def trained(run: Run, module: nn.Module | None = None) -> Iterator[Step]:
    """Train, and yield each step after its update."""
    model = begin(run, module)
    for step in run.steps():
        run_batches(step, model)
        step.update()
        yield step


def lost_variables(url: str) -> list[str]:
    """Return the variables of a script that have begun anew with a group of a run, as its events name them."""
    warnings = events_of(read_ledger(Store(url)).events, WarningEvent)
    return [event.detail for event in warnings if event.code == "state_in_script"]


def refusal(job: Job, act: Callable[[Run], object]) -> str:
    """Return the message with which a run on one rank refuses what a script does."""
    with local_world(CPU):
        run = cpu_run(job)
        with pytest.raises(UsageError) as caught:
            act(run)
        run.free()
    return str(caught.value)
