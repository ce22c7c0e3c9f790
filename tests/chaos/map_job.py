"""Job over a map-style dataset whose samples are augmented at random, for the test that runs it under faults."""

import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import undula


@dataclass(frozen=True)
class Config:
    """Settings of the script."""

    num_workers: int = 0
    pace_s: float = 0.0
    """Minimum duration of a step in seconds, because faults are scheduled by step."""


class Shapes(Dataset[tuple[Tensor, int]]):
    """Images of noise around one of three colours, shifted and dimmed at random."""

    def __init__(self, first: int, rows: int):
        self._first, self._rows = first, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = np.random.default_rng(self._first + index)
        image = generator.random((3, 8, 8), dtype=np.float32)
        label = index % 3
        image[label] += 0.5
        shifted = torch.roll(torch.from_numpy(image), random.randrange(8), dims=2)
        return shifted * float(np.random.uniform(0.5, 1.0)) + 0.1 * torch.randn(3, 8, 8), label


def masked(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Collate samples, and blacken one row of all their pixels."""
    images = torch.stack([image for image, _ in samples])
    images[:, :, int(torch.randint(8, ()))] = 0
    return images, torch.tensor([label for _, label in samples])


def train(run: undula.Run) -> None:
    config: Config = run.config
    run.dataset(Shapes(0, 500), validation=Shapes(500, 60), collate_fn=masked, num_workers=config.num_workers)
    model = run.model(nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)))
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))

    def loss(batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    for step in run.steps(validate=loss):
        began = time.monotonic()
        for batch in step.batches():
            step.backward(loss(batch))
        step.update()
        time.sleep(max(began + config.pace_s - time.monotonic(), 0.0))


if __name__ == "__main__":
    undula.main(train, config=Config)
