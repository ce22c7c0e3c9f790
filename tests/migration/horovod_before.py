"""Fits a curve with Horovod Elastic: `horovodrun -np 2 --min-np 1 --host-discovery-script ./discover_hosts.sh python horovod_before.py`."""

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
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


def main() -> None:
    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    data = Curve()
    sampler = hvd.elastic.ElasticSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    model = make_model().to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9), model.named_parameters()
    )
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    losses: list[float] = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < EPOCHS:
            for batch, (x, y) in enumerate(loader):
                loss = F.mse_loss(model(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with optimizer.skip_synchronize():
                    optimizer.step()
                scheduler.step()
                losses.append(hvd.allreduce(loss.detach()).item())
                state.sampler.record_batch(batch, BATCH)
                state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, scheduler=scheduler, epoch=0)
    train(state)
    if hvd.rank() == 0:
        Path(sys.argv[1], "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
