"""Job over a LightningModule, for the test that runs it under faults. Its hooks count in state that changes the loss."""

import time
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import undula
from undula.adapters.lightning import fit


class Shapes(Dataset[tuple[Tensor, int]]):
    """Images of noise around one of three colours."""

    def __init__(self, first: int, rows: int):
        self._first, self._rows = first, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % 3
        image = 0.1 * torch.randn(3, 8, 8)
        image[label] += (self._first + index) % 7 / 7
        return image, label


class Data(pl.LightningDataModule):
    def __init__(self, num_workers: int):
        super().__init__()
        self.num_workers = num_workers

    def train_dataloader(self) -> Any:
        return DataLoader(Shapes(0, 500), batch_size=3, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> Any:
        return DataLoader(Shapes(500, 60), batch_size=3)


class Classifier(pl.LightningModule):
    def __init__(self, pace_s: float):
        super().__init__()
        self.pace_s = pace_s
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
        self.epochs = self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss * (1 + 0.01 * self.epochs + 0.02 * self.validations)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self.pace_s)  # faults are scheduled by step

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self.net(images), labels))

    def on_validation_end(self) -> None:
        self.validations += 1

    def on_train_epoch_end(self) -> None:
        self.epochs += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counts"] = [self.epochs, self.validations]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.epochs, self.validations = checkpoint["counts"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.003)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def train(run: undula.Run) -> None:
    fit(run, Classifier(run.config.pace_s), Data(run.config.num_workers))


if __name__ == "__main__":
    undula.main(train)
