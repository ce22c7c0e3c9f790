"""Tests of a process that is in one worker group after another: nothing of a former group stays in its memory."""

import ctypes
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from horovod_ranks import on_horovod_ranks
from night import at_night
from numbers_job import cpu_run, numbers_job, run_batches
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from undula.parallel.spec import GradientSpec
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.train.job import Job
from undula.train.run import Run

WIDTH = 1000
MODEL_BYTES = 4 * WIDTH**2
GROUPS = 10
SETTLED = 3
"""Number of groups after which the heap has reached its size."""
SETTINGS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "sharded": {},
    "adasum": {"gradient": GradientSpec(reduce="adasum")},
    "horovod": {"engine": "horovod"},
}


def network(is_sharded: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    return fully_shard(model) if is_sharded else model


def _train_until_left(run: Run, worker: WorkerState, is_sharded: bool) -> list[weakref.ref[Any]]:
    """Train two steps, leave the group, and return references to the parameters, which do not keep them in memory."""
    model = run.model(network(is_sharded))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    found = [weakref.ref(parameter) for parameter in model.parameters()]
    try:
        for count, step in enumerate(run.steps()):
            run_batches(step, model)
            if count == 1:
                worker.request = Request(leaves=True)
            step.update()
    except LeaveGroup:
        run.hand_over()
    return found


def _groups(rank: int, world_size: int, job: Job, is_sharded: bool) -> tuple[int, list[int]]:
    """Return the number of parameters of former groups that are in memory, and the resident bytes after each group."""
    worker, found, resident = WorkerState(), [], []
    for _ in range(GROUPS):
        worker.join_group()
        run = cpu_run(job, rank, world_size, worker)
        found += _train_until_left(run, worker, is_sharded)
        run.free()
        gc.collect()  # as a worker does when it joins a group
        ctypes.CDLL(None).malloc_trim(0)  # gives back what is free, so that the rest is what is in use
        resident.append(psutil.Process().memory_info().rss)
    return sum(reference() is not None for reference in found), resident


@pytest.mark.parametrize("settings", ["sharded", *at_night(name for name in SETTINGS if name != "sharded")])
def test_no_weights_of_former_groups_stay_in_memory(settings: str, tmp_path: Path) -> None:
    on = on_horovod_ranks if settings == "horovod" else on_ranks
    job = replace(numbers_job(tmp_path, epochs=20), **SETTINGS[settings])
    for alive, resident in on(2, _groups, job, settings == "sharded"):
        assert alive == 0
        assert resident[-1] - resident[SETTLED - 1] < (GROUPS - SETTLED) * MODEL_BYTES
