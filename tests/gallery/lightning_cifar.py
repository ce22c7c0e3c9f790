"""Trains an image classifier as Lightning's CIFAR10 tutorial does: a data module, OneCycleLR in steps, torchmetrics, callbacks, a test."""

import argparse

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, random_split
from torchmetrics.functional import accuracy

from undula.adapters.lightning import Trainer, launch


class Flipped(Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, label = self.images[index]
        return (image.flip(1) if torch.rand(()) < 0.5 else image), label


class ShapesDataModule(pl.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        if stage in ("fit", None):
            train, self.val = random_split(Shapes(0, 120), [96, 24], generator=torch.Generator().manual_seed(42))
            self.train = Flipped(train)
        if stage in ("test", None):
            self.test = Shapes(1000, 30)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, num_workers=1, persistent_workers=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, self.hparams.batch_size)


class LitResnet(pl.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.residual = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.fc = nn.Linear(200, 3)

    def forward(self, x):
        x = self.conv(x)
        return F.log_softmax(self.fc((x + self.residual(x)).flatten(1)), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def evaluate(self, batch, stage):
        x, y = batch
        logits = self(x)
        self.log(f"{stage}_loss", F.nll_loss(logits, y), prog_bar=True)
        self.log(f"{stage}_acc", accuracy(logits.argmax(dim=1), y, task="multiclass", num_classes=3), prog_bar=True)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        scheduler = OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    pl.seed_everything(7)
    trainer = Trainer(max_epochs=args.epochs, accelerator="auto", devices=1)
    model, datamodule = LitResnet(), ShapesDataModule()
    trainer.fit(model, datamodule)


if __name__ == "__main__":
    launch(main)
