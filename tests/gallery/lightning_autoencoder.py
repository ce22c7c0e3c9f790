"""Trains an autoencoder as Lightning's first example does."""

import argparse

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn
from torch.utils.data import DataLoader

from undula.adapters.lightning import Trainer, launch


class LitAutoEncoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 144))

    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    pl.seed_everything(1)
    trainer = Trainer(max_epochs=args.epochs, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(
        LitAutoEncoder(), DataLoader(Shapes(), batch_size=8, shuffle=True), DataLoader(Shapes(1000, 30), batch_size=8)
    )


if __name__ == "__main__":
    launch(main)
