"""Forecasts time series as the libraries on Lightning do: windows of history, quantiles, clipping, early stopping, the best checkpoint."""

import argparse
import math

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from undula.adapters.lightning import Trainer, launch

HISTORY, HORIZON, QUANTILES = 12, 4, (0.1, 0.5, 0.9)


class Windows(Dataset):
    def __init__(self, first, rows):
        generator = torch.Generator().manual_seed(3)
        hours = torch.arange(200.0)
        self.series = torch.sin(2 * math.pi * hours / 24) + 0.5 * torch.sin(2 * math.pi * hours / 7)
        self.series += 0.1 * torch.randn(200, generator=generator)
        self.first, self.rows = first, rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        start = self.first + index
        past = self.series[start : start + HISTORY]
        return {"past": past, "hour": start % 24, "future": self.series[start + HISTORY : start + HISTORY + HORIZON]}


class Forecaster(pl.LightningModule):
    def __init__(self, width=16, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.hour = nn.Embedding(24, 4)
        self.rnn = nn.GRU(1, width, batch_first=True)
        self.out = nn.Linear(width + 4, HORIZON * len(QUANTILES))

    def forward(self, past, hour):
        mean, scale = past.mean(dim=1, keepdim=True), past.std(dim=1, keepdim=True) + 1e-3
        _, hidden = self.rnn(((past - mean) / scale).unsqueeze(2))
        output = self.out(torch.cat((hidden[-1], self.hour(hour)), dim=1))
        return output.view(-1, HORIZON, len(QUANTILES)) * scale.unsqueeze(2) + mean.unsqueeze(2)

    def step(self, batch):
        forecast = self(batch["past"], batch["hour"])
        error = batch["future"].unsqueeze(2) - forecast
        quantiles = torch.tensor(QUANTILES, device=self.device)
        return forecast, torch.maximum(quantiles * error, (quantiles - 1) * error).mean()

    def training_step(self, batch, batch_idx):
        _, loss = self.step(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        forecast, loss = self.step(batch)
        middle = forecast[:, :, 1]
        self.log_dict({"val_loss": loss, "val_mae": F.l1_loss(middle, batch["future"])}, on_epoch=True, prog_bar=True)

    def on_before_optimizer_step(self, optimizer):
        norms = pl.utilities.grad_norm(self, norm_type=2)
        self.log("rnn_grad", norms["grad_2.0_norm/rnn.weight_hh_l0"])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    pl.seed_everything(1, workers=True)
    trainer = Trainer(
        max_epochs=args.epochs,
        gradient_clip_val=0.1,
        deterministic=True,
        log_every_n_steps=5,
    )
    train_loader = DataLoader(Windows(0, 128), batch_size=16, shuffle=True, drop_last=True)
    trainer.fit(Forecaster(), train_loader, DataLoader(Windows(140, 40), batch_size=16))


if __name__ == "__main__":
    launch(main)
