"""Fits a curve with Ray Train: `python ray_train_before.py`."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCH = 3, 16


class Curve(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([index * 37 % 320 / 160 - 1.0])
        return x, torch.sin(3 * x)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def train(config: dict[str, Any]) -> None:
    loader = ray.train.torch.prepare_data_loader(DataLoader(Curve(), batch_size=BATCH))
    model = ray.train.torch.prepare_model(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    losses = []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            losses.append(mean.item())
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, Path(folder, "checkpoint.pt"))
            ray.train.report({"loss": losses[-1]}, checkpoint=Checkpoint.from_directory(folder))
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["out"], "losses.json").write_text(json.dumps(losses))


def main() -> None:
    trainer = TorchTrainer(
        train,
        train_loop_config={"lr": 1e-2, "out": sys.argv[1]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="curve", storage_path=sys.argv[1]),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
