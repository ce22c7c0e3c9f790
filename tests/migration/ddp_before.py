"""Fits a curve with DistributedDataParallel: `torchrun --nproc-per-node 2 ddp_before.py`."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

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


def main() -> None:
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    data = Curve()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            losses.append(mean.item())
        if dist.get_rank() == 0:
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, Path(sys.argv[1], "checkpoint.pt"))
    if dist.get_rank() == 0:
        Path(sys.argv[1], "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
