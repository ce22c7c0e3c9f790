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
    """Return a job for `on_drawn` in feature_scripts.py."""
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
