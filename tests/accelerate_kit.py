"""A small script for Accelerate's loop, whose parts tests replace, and its training in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from undula.adapters.accelerate import Accelerator
from undula.adapters.script import Script, ScriptConfig
from undula.config.job import load_spec
from undula.driver.launch import record_job
from undula.driver.preflight import check_job, examine
from undula.parallel.layout import join_layout
from undula.recovery.worker_state import LeaveGroup, WorkerState
from undula.storage import open_store
from undula.train.job import Job
from undula.train.run import Run
from undula.train.session import GroupSession
from undula.train.setup import RunSetup
from undula.train.single_process import local_world

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
            self.after_epoch(accelerator, model, evaluation, epoch)

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

    def after_epoch(self, accelerator: Any, model: nn.Module, evaluation: Any, epoch: int) -> None:
        pass


def prepared_job(loop: Callable[[], None], folder: Path, *overrides: str) -> tuple[Script, Job]:
    """Return a script as the driver has checked it, and its job, with two virtual workers."""
    script = Script(loop)
    (folder / "job.yaml").write_text("{name: loop, plan: {virtual_workers: 2}}")
    loaded = load_spec(folder / "job.yaml", [f"runs={folder}/runs", *overrides], ScriptConfig, settings=script.settings)
    examined = examine(script, loaded, check_job(loaded))
    job = record_job(loaded, examined.plan, open_store(loaded.spec.run_url), examined.script_data).job
    return Script(loop), job


def train_once(script: Script, job: Job, worker: WorkerState | None = None) -> None:
    """Train in a group of one rank, which can end early and leave its state in the worker."""
    worker = worker or WorkerState()
    with local_world(torch.device("cpu")):
        worker.join_group()
        layout = join_layout(0, 1, torch.device("cpu"))
        run = Run(GroupSession(RunSetup.of(job, layout, worker, lambda message: None)))
        try:
            script(run)
        except (OSError, LeaveGroup):
            run.hand_over()
        finally:
            run.free()


def changed(part: str, value: Callable[..., Any]) -> Loop:
    loop = Loop()
    setattr(loop, part, value)
    return loop
