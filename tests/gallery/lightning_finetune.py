"""Fine-tunes a classifier whose backbone is unfrozen after a while, with a callback of Lightning's kind."""

import argparse

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn
from torch.utils.data import DataLoader

from undula.adapters.lightning import Trainer, launch


class Unfreeze(pl.Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            module.backbone.requires_grad_(True)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten()).requires_grad_(False)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(800, 3))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    pl.seed_everything(1)
    trainer = Trainer(
        max_epochs=args.epochs, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[Unfreeze()]
    )
    trainer.fit(Classifier(), DataLoader(Shapes(), batch_size=8, shuffle=True))


if __name__ == "__main__":
    launch(main)
