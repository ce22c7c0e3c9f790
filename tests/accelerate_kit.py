"""A small script for Accelerate's loop, whose parts tests replace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from adapters_kit import job_of_script, store_of, train_here
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from undula.adapters.accelerate import Accelerator
from undula.state.ledger import Ledger, read_ledger
from undula.train.job import Job

ROWS = TensorDataset(torch.ones(12, 2))


class Loop:
    """Loop of a small script, whose parts tests replace."""

    def __init__(self, **arguments: Any):
        self.arguments = arguments

    def __call__(self) -> None:
        accelerator = Accelerator(**self.arguments)
        torch.manual_seed(3)
        model = nn.Linear(2, 1)
        optimizer = self.optimizer(model)
        prepared = accelerator.prepare(self.loader(), model, optimizer, self.evaluation(), *self.more(optimizer))
        loader, model, optimizer, evaluation, *scheduler = prepared
        self.before(accelerator)
        for epoch in accelerator.epochs(2):
            for (x,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).square().mean())
                    self.in_step(accelerator, model)
                    optimizer.step()
                    for each in scheduler:
                        each.step()
                    optimizer.zero_grad()
                    self.after_step(model)
            if self.after_epoch(accelerator, model, evaluation, epoch):
                break

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(24.0).reshape(12, 2) / 24), batch_size=2)

    def evaluation(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(10.0).reshape(5, 2)), batch_size=2)

    def more(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        return []

    def before(self, accelerator: Any) -> None:
        pass

    def in_step(self, accelerator: Any, model: nn.Module) -> None:
        pass

    def after_step(self, model: nn.Module) -> None:
        pass

    def after_epoch(self, accelerator: Any, model: nn.Module, evaluation: Any, epoch: int) -> bool | None:
        """Work after an epoch, and return whether it is the last one."""
        return None


def job_of(loop: Callable[[], None], folder: Path, *overrides: str) -> Job:
    """Return the job that the driver makes of a script, with two virtual workers."""
    return job_of_script(loop, folder, *overrides, virtual_workers=2)


def train(loop: Callable[[], None], folder: Path, *overrides: str) -> Ledger:
    """Train a script on one rank, with two virtual workers."""
    return read_ledger(store_of(train_here(loop, folder, *overrides, virtual_workers=2)))


def changed(part: str, value: Callable[..., Any]) -> Loop:
    loop = Loop()
    setattr(loop, part, value)
    return loop
