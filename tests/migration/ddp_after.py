"""Fits a curve on workers that come and go: `undula run ddp_after.yaml`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

import undula


class Curve(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([index * 37 % 320 / 160 - 1.0])
        return x, torch.sin(3 * x)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def train(run: undula.Run) -> None:
    run.dataset(Curve(), name="curve 1")
    model = run.model(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.base_lr)
    run.optimizer(optimizer, CosineAnnealingLR(optimizer, T_max=run.plan.total_steps))
    for step in run.steps():
        for x, y in step.batches():
            step.backward(F.mse_loss(model(x), y))
        step.update()


if __name__ == "__main__":
    undula.main(train)
