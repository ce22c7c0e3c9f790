"""Trains an image classifier as Accelerate's example for images does: a scheduler that steps with each batch, metrics of all processes."""

import argparse

import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from undula.adapters.accelerate import Accelerator, launch


def training_function(args):
    accelerator = Accelerator()
    torch.manual_seed(42)
    train_dataloader = DataLoader(Shapes(), shuffle=True, batch_size=8)
    eval_dataloader = DataLoader(Shapes(1000, 30), shuffle=False, batch_size=8)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(800, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 / 25)
    scheduler = OneCycleLR(optimizer, max_lr=0.01, epochs=args.epochs, steps_per_epoch=len(train_dataloader))
    model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, scheduler
    )
    for epoch in accelerator.epochs(args.epochs):
        model.train()
        for images, labels in train_dataloader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate, count = 0, 0
        for images, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(images).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            accurate += (predictions == labels).sum().item()
            count += len(labels)
        accelerator.print(f"epoch {epoch}: {100 * accurate / count:.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    training_function(parser.parse_args())


if __name__ == "__main__":
    launch(main)
