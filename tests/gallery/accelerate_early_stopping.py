"""Stops early as Accelerate's example of this feature does: a trigger that any process may set, and all of them check."""

import argparse

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from shapes import Shapes
from torch import nn
from torch.utils.data import DataLoader

from undula.adapters.accelerate import Accelerator, launch


class EarlyStoppingCallback:
    def __init__(self, min_delta=2e-2, patience=2):
        self.min_delta, self.patience, self.counter, self.lowest_loss = min_delta, patience, 0, float("inf")

    def check_early_stopping(self, eval_loss):
        delta = self.lowest_loss - eval_loss
        if delta >= self.min_delta:
            self.lowest_loss, self.counter = eval_loss, 0
        else:
            self.counter += 1
        return self.counter >= self.patience

    def state_dict(self):
        return {"counter": self.counter, "lowest_loss": self.lowest_loss}

    def load_state_dict(self, state):
        self.counter, self.lowest_loss = state["counter"], state["lowest_loss"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"])
    args = parser.parse_args()
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    set_seed(42)
    train_dataloader = DataLoader(Shapes(), shuffle=True, batch_size=8, drop_last=True)
    eval_dataloader = DataLoader(Shapes(1000, 30), batch_size=8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 3)).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    stopping = EarlyStoppingCallback()
    accelerator.register_for_checkpointing(stopping)
    for epoch in accelerator.epochs(args.epochs):
        model.train()
        for images, labels in train_dataloader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        losses = []
        for images, labels in eval_dataloader:
            with torch.no_grad():
                losses_of_batch = F.cross_entropy(model(images), labels, reduction="none")
            losses.append(accelerator.gather_for_metrics(losses_of_batch))
        eval_loss = torch.cat(losses).mean().item()
        accelerator.print(f"epoch {epoch}: {eval_loss:.4f}")
        if stopping.check_early_stopping(eval_loss):
            accelerator.set_trigger()
        if accelerator.check_trigger():
            accelerator.print("early stopping")
            break
    accelerator.wait_for_everyone()
    accelerator.save_model(model, "early")


if __name__ == "__main__":
    launch(main)
