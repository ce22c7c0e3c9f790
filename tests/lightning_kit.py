"""The two scripts of docs/lightning.md with their job, and a small module whose parts tests replace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from adapters_kit import store_of, train_here
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from undula.adapters.lightning import Trainer
from undula.state.ledger import Ledger, read_ledger

PAGE = Path(__file__).parents[1] / "docs" / "lightning.md"


def blocks() -> tuple[str, str, str]:
    """Return the script before, the script after, and the job, as the page shows them."""
    text = PAGE.read_text()
    before, diff, job = (text.split(f"```{kind}\n", 1)[1].split("```", 1)[0] for kind in ("python", "diff", "yaml"))
    lines = diff.splitlines(keepends=True)
    removed, added = ([line[1:] for line in lines if line[0] == sign] for sign in "-+")
    assert all(before.count(line) == 1 for line in removed)
    after = added[0] + before
    for old, new in zip(removed, added[1:], strict=True):
        after = after.replace(old, new)
    return before, after, job


def defined(script: str) -> dict[str, Any]:
    """Return what a script defines."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, "script.py", "exec"), names)
    return names


class Tiny(pl.LightningModule):
    """Module whose loss depends on what its hooks have counted, so that a hook that is lost or repeated changes the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(3, 1)
        self.epochs = self.validations = 0
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        loss = self.net(x).square().mean()
        self.log_dict({"a": loss, "b": 2.0}, prog_bar=True, on_epoch=True, sync_dist=True)
        return {"loss": loss * (1 + self.epochs + 10 * self.validations), "x": x}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(self.net(batch[0]).square().mean())
        return self.seen[-1]

    def on_validation_epoch_end(self) -> None:
        self.validations += 0 if self.trainer.sanity_checking else len(torch.stack(self.seen))
        self.seen.clear()

    def on_train_epoch_end(self) -> None:
        self.epochs += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counts"] = [self.epochs, self.validations]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.epochs, self.validations = checkpoint["counts"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "epoch"}}

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(36.0).reshape(12, 3) / 36), batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(3, 3)), batch_size=4)


def train_module(make: Callable[[], pl.LightningModule], folder: Path, *overrides: str, **more: Any) -> Ledger:
    """Train a module for two epochs of three steps, on one rank."""
    workers = more.pop("virtual_workers", 1)

    def main() -> None:
        Trainer(**{"max_epochs": 2, **more}).fit(make())

    job = train_here(main, folder, "validation.every_steps=2", *overrides, virtual_workers=workers)
    return read_ledger(store_of(job))


def tiny(**methods: Callable[..., Any]) -> type[Tiny]:
    """Return Tiny with other methods."""
    return type("Tiny", (Tiny,), methods)


def loader(**more: Any) -> Callable[[Any], Any]:
    """Return a method for `train_dataloader` or `val_dataloader`."""
    return lambda self: DataLoader(TensorDataset(torch.ones(12, 3)), **{"batch_size": 4, **more})


def optimizers(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a method for `configure_optimizers`."""
    return lambda self: make(torch.optim.SGD(self.parameters(), lr=0.01))


JOB = """
name: digits
plan: {shuffle: none, global_batch: 4, virtual_workers: 1, epochs: 2}
validation: {every_steps: 2}
workers: {max: 1}
"""
"""Job of a script of `undula.main`, whose YAML has the plan of Tiny."""
