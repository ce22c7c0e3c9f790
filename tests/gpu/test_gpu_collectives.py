"""Tests of what a script's model may not do on GPUs: collectives of NCCL in a batch, and SyncBatchNorm, which becomes BatchNorm."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from numbers_job import network, numbers_job
from torch import Tensor, nn

from undula.errors import UsageError
from undula.train.run import Run
from undula.train.single_process import SingleProcess


class Meeting(nn.Module):
    """Network whose forward pass sums its mean over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        mean = self.net(x).detach().mean()
        dist.all_reduce(mean)
        return self.net(x) - mean  # type: ignore[no-any-return]


def train(run: Run, module: nn.Module) -> None:
    model = run.model(module)
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(batch["x"][:, None] / 48).square().mean())
        step.update()


def test_a_collective_in_a_forward_pass_is_refused(tmp_path: Path, any_device: torch.device) -> None:
    def script(run: Run) -> None:
        train(run, Meeting())

    with pytest.raises(UsageError, match=r"has begun a collective of torch\.distributed in a batch of step 0"):
        SingleProcess(script, numbers_job(tmp_path), lambda message: None, device=any_device)()


def test_sync_batch_norm_trains_as_batch_norm(tmp_path: Path, any_device: torch.device) -> None:
    weights = []
    for kind in (nn.BatchNorm1d, nn.SyncBatchNorm):
        module = nn.Sequential(network(), kind(1))

        def script(run: Run, module: nn.Module = module) -> None:
            train(run, module)

        SingleProcess(script, numbers_job(tmp_path / kind.__name__), lambda message: None, device=any_device)()
        weights.append([each.tolist() for each in module.state_dict().values()])
    assert weights[0] == weights[1]
