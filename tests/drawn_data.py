"""Map-style datasets whose samples draw random numbers of every kind, and a job that trains on one."""

import random
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from undula.data.script.indexed import IndexedData, ScriptData
from undula.data.spec import DataSpec, ValidationSpec
from undula.parallel.spec import GradientSpec
from undula.plan.plan import PlanSpec
from undula.plan.schedule import ScheduleSpec
from undula.state.spec import CheckpointSpec
from undula.train.job import Job
from undula.train.run import Run

ROWS = 103


class Drawn(Dataset[dict[str, Any]]):
    """Samples that have their index and a number of each generator."""

    def __init__(self, rows: int = ROWS):
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "x": torch.tensor([index / self._rows]) + torch.rand(1),
            "python": random.random(),
            "numpy": np.random.rand(),
        }


class DrawnAtOnce(Drawn):
    """The same, read several at a time as the datasets of Hugging Face are, whose fingerprint it has."""

    _fingerprint = "5c4f2a"

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        numbers = torch.rand(len(indices), 1)
        return [{"index": index, "x": number} for index, number in zip(indices, numbers, strict=True)]


def with_noise(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate function that draws as well, as one that masks tokens does."""
    return {**default_collate(samples), "noise": torch.rand(1)}


def drawn_job(folder: Path, num_workers: int = 0, **plan: Any) -> Job:
    """Return a job for `train_on_drawn`."""
    return Job(
        name="drawn",
        run_url=str(folder / "run"),
        run_id=token_hex(8),  # keeps the run from using a snapshot of an earlier test in the memory of this machine
        data=DataSpec(),
        plan=PlanSpec(**{"global_batch": 12, "virtual_workers": 4, "micro_batch": 2, **plan}),
        deterministic=True,
        schedule=ScheduleSpec(base_lr=0.1),
        gradient=GradientSpec(),
        validation=ValidationSpec(every_steps=5),
        checkpoint=CheckpointSpec(every_steps=4),
        config={"num_workers": num_workers},
        script_data=ScriptData(IndexedData(ROWS, ""), IndexedData(26, ""), num_workers),
    )


def train_on_drawn(run: Run) -> None:
    """Train a linear model, with a validation."""
    run.dataset(Drawn(), validation=Drawn(26), collate_fn=with_noise, num_workers=run.config["num_workers"])
    model = run.model(torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Dropout(0.2), torch.nn.Linear(3, 1)))
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))

    def loss(batch: dict[str, Tensor]) -> Tensor:
        target = batch["noise"] + (batch["python"] + batch["numpy"]).float()
        squares: Tensor = (model(batch["x"])[:, 0] - target).square()
        return squares.mean()

    for step in run.steps(validate=loss):
        for batch in step.batches():
            step.backward(loss(batch))
        step.update()
