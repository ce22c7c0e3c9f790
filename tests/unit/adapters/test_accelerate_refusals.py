"""Tests of what the stand-in for Accelerate's Accelerator refuses, in the driver and in the loop."""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from accelerate_kit import ROWS, Loop, changed, job_of, train
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from undula.adapters.accelerate import Accelerator, launch
from undula.errors import UndulaError, UsageError


def with_scheduler(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def changes_the_rate(accelerator: Any, *_: object) -> None:
    accelerator._optimizer.param_groups[0]["lr"] *= 0.5


def iterates(accelerator: Any, model: nn.Module, evaluation: Any, epoch: int) -> None:
    accelerator.backward(model(torch.ones(1, 2)).mean())


def computes_a_part(accelerator: Any, model: nn.Module) -> None:
    accelerator.backward(model(torch.ones(1, 2)).mean(), inputs=[model.weight])


def computes_twice(accelerator: Any, model: nn.Module) -> None:
    accelerator.backward(model(torch.ones(1, 2)).mean())


def uses_the_norm(accelerator: Any, model: nn.Module) -> None:
    print(f"{accelerator.clip_grad_norm_(model.parameters(), 1.0):.3f}")


def clips_by_torch(accelerator: Any, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (changed("in_step", lambda it, _: it.gather(torch.ones(1))), "accelerator.gather() was used for a batch of the training"),
        (changed("after_epoch", lambda it, *_: it.gather_for_metrics(torch.ones(1))), "accelerator.gather_for_metrics() was called out"),
        (changed("after_epoch", iterates), "accelerator.backward() was called outside of a step"),
        (changed("after_epoch", changes_the_rate), "the script changed the learning rate of parameter group 0 from 0.1 to 0.05"),
        (changed("in_step", clips_by_torch), "clip_grad_norm_() changed a gradient of an open step"),
        (changed("in_step", lambda _, model: model.zero_grad()), "zero_grad() was called after step.backward() in step 0"),
        (changed("in_step", lambda _, model: model(torch.ones(1, 2)).sum().backward()), "loss.backward() was called in step 0"),
        (changed("in_step", lambda it, model: it.clip_grad_norm_([model.weight], 1.0)), "accelerator.clip_grad_norm_() clips the"),
        (changed("in_step", lambda it, model: it.clip_grad_norm_(model.parameters(), None)), "accelerator.clip_grad_norm_() got max_norm"),
        (changed("in_step", computes_a_part), "accelerator.backward() does not take inputs="),
        (changed("in_step", uses_the_norm), "what accelerator.clip_grad_norm_() returned is used for each batch"),
        (changed("in_step", computes_twice), "accelerator.backward() was called twice for a batch; add up the losses"),
        (changed("in_step", lambda accelerator, _: accelerator.log({"a": "b"})), "accelerator.log() got 'a' of type str"),
        (changed("in_step", lambda accelerator, _: accelerator.skip), "the Accelerator of undula.adapters.accelerate"),
    ],
)  # fmt: skip
def test_wrong_calls_in_the_loop_are_refused(tmp_path: Path, loop: Loop, sentence: str) -> None:
    with pytest.raises((UsageError, AttributeError)) as caught:
        train(loop, tmp_path)
    assert str(caught.value).startswith(sentence)


def uses_the_group(*_: Any) -> None:
    dist.barrier()


def shards_its_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (changed("before", lambda _: os.environ["LOCAL_RANK"]), "the script reads the environment variable LOCAL_RANK, which"),
        (changed("before", uses_the_group), "the script uses torch.distributed where no run has made its process group"),
        (changed("optimizer", shards_its_optimizer), "ZeroRedundancyOptimizer shards its state over the ranks itself"),
        (changed("before", lambda _: sys.exit()), "the script ended without training as a run"),
    ],
)  # fmt: skip
def test_what_a_launchers_script_does_before_it_trains_is_refused_in_the_driver(
    tmp_path: Path, loop: Loop, sentence: str
) -> None:
    with pytest.raises(UndulaError) as caught:
        job_of(loop, tmp_path)
    assert str(caught.value).startswith(sentence)


def test_what_accelerate_launch_was_asked_for_is_taken_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert job_of(Loop(), tmp_path).precision.compute == "bf16"
    assert job_of(Loop(mixed_precision="no"), tmp_path).precision.compute == "fp32"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(
        UsageError, match=r"^accelerate launch has set ACCELERATE_USE_FSDP=true, .* sharding\.stage in the"
    ):
        job_of(Loop(), tmp_path)


class Unfinished(Loop):
    """Script whose loop over batches lacks something."""

    def __init__(self, lacks: str):
        super().__init__()
        self.lacks = lacks

    def __call__(self) -> None:
        accelerator = Accelerator()
        model = nn.Linear(2, 1)
        optimizer = self.optimizer(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader, model, optimizer, scheduler = accelerator.prepare(self.loader(), model, optimizer, scheduler)
        for _ in accelerator.epochs(2):
            for (x,) in loader:
                accelerator.backward(model(x).mean())
                if self.lacks != "optimizer":
                    optimizer.step()
                if self.lacks != "scheduler":
                    scheduler.step()
                if self.lacks == "batches" and accelerator.sync_gradients:
                    break
                if self.lacks == "epochs" and accelerator.sync_gradients:
                    return


class AccumulatesByHand(Loop):
    """Script that divides its loss and lets its optimizer take a step after several batches.

    Args:
        due: Whether each batch ends a step, again and again.
        arguments: Arguments of the Accelerator.
    """

    def __init__(self, *due: bool, **arguments: Any):
        super().__init__(**arguments)
        self.due = due

    def __call__(self) -> None:
        accelerator = Accelerator(**self.arguments)
        model = nn.Linear(2, 1)
        loader, model, optimizer = accelerator.prepare(self.loader(), model, self.optimizer(model))
        for _ in accelerator.epochs(2):
            due = cycle(self.due)
            for (x,) in loader:
                with accelerator.accumulate(model) if self.arguments else nullcontext():
                    accelerator.backward(model(x).mean() / 2)
                    if accelerator.sync_gradients:
                        print(x)
                    if next(due):
                        optimizer.step()


@pytest.mark.parametrize(
    "loop",
    [
        AccumulatesByHand(False, True),
        AccumulatesByHand(False, True, gradient_accumulation_steps=2),
        AccumulatesByHand(False, False, False, True, False, True, gradient_accumulation_steps=3),
    ],
)
def test_accumulation_by_hand_is_refused_where_a_worker_has_as_many_batches_in_a_step(
    tmp_path: Path, loop: Loop
) -> None:
    with pytest.raises(UsageError, match=r"^step \d has a batch without optimizer.step\(\); call it for each batch"):
        train(loop, tmp_path)


COUNTS = """
import torch
from accelerate_kit import Loop
from undula.adapters.accelerate import Accelerator

def main():
    loop, accelerator, model = Loop(), Accelerator(gradient_accumulation_steps=3), torch.nn.Linear(2, 1)
    loader, model, optimizer = accelerator.prepare(loop.loader(), model, loop.optimizer(model))
    for epoch in accelerator.epochs(2):
        Epoch().train(accelerator, model, loader, optimizer)

class Epoch:
    seen = 0

    def train(self, accelerator, model, loader, optimizer):
        count = 0
        for number, (x,) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean() / 3)
                count += 1
                self.seen += 1
                if number % 2:
                    print(number)
                WORK

    def unused(self, accelerator, model, loader, optimizer):
        for number, (x,) in enumerate(loader):
            model(x).mean().backward()
            if number % 3 == 2:
                optimizer.step()
"""
OWN_COUNTS = {
    "if (number + 1) % 3 == 0: optimizer.step()": "optimizer.step()",
    "if number % 3 == 2 or number == len(loader) - 1: optimizer.step(); optimizer.zero_grad()": "optimizer.step()",
    "if count == 3: accelerator.print(x); optimizer.step(); count = 0": "optimizer.step()",
    "if self.seen % 3 == 0 and accelerator.sync_gradients: optimizer.step()": "optimizer.step()",
    "if number % 3 == 0: accelerator.clip_grad_norm_(model.parameters(), 1.0)": "accelerator.clip_grad_norm_()",
    "optimizer.step(); torch.distributed.get_world_size()": "torch.distributed",
    "if accelerator.sync_gradients: optimizer.step()": "",
    "if accelerator.sync_gradients: accelerator.clip_grad_norm_(model.parameters(), 1.0)": "",
    "optimizer.step()": "",
}


@pytest.mark.parametrize(("work", "call"), OWN_COUNTS.items())
def test_a_step_after_a_count_of_batches_is_refused_before_a_worker_starts(
    tmp_path: Path, work: str, call: str
) -> None:
    (tmp_path / "script.py").write_text(COUNTS.replace("WORK", work))
    main = runpy.run_path(str(tmp_path / "script.py"))["main"]
    if not call:
        assert job_of(main, tmp_path).plan.global_batch == 12
        return
    with pytest.raises(UsageError) as caught:
        job_of(main, tmp_path)
    sentence = f"script.py:24: this `if` calls {call} after a number of batches that the"
    if call == "torch.distributed":
        sentence = "script.py:24: get_world_size() of torch.distributed is called for a batch"
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("lacks", "sentence"),
    [
        ("optimizer", "step 0 has a batch without optimizer.step(); call it for each batch"),
        ("scheduler", "step 0 ended without scheduler.step(); call it after optimizer.step()"),
        ("batches", "the loop over the training DataLoader ended after step 0, before the end of epoch 0"),
        ("epochs", "the loop over the training DataLoader ended after step 0, before the end of epoch 0"),
    ],
)
def test_a_loop_that_is_not_complete_is_refused(tmp_path: Path, lacks: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        train(Unfinished(lacks), tmp_path, "plan.max_steps=6")
    assert str(caught.value).startswith(sentence)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(2)


class Streamed:
    """Dataset that can only be read in its order, and does not derive from torch's IterableDataset, as those of `datasets` do."""

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(2)


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (changed("optimizer", with_scheduler), "the optimizer has a scheduler that accelerator.prepare() did not get"),
        (Loop(mixed_precision="fp8"), "Accelerator got mixed_precision='fp8'; set it to one of 'no', 'fp16', 'bf16'"),
        (Loop(log_with="all"), "Accelerator does not take log_with=; remove it"),
        (Loop(cpu=True), "Accelerator does not take cpu=; remove it"),
        (Loop(step_scheduler_with_optimizer=False), "Accelerator does not take step_scheduler_with_optimizer=; leave"),
        (Loop(even=True), "Accelerator got even=, which it does not know"),
        (Loop(split_batches=True, cpu=False, project_dir=None), ""),
        (Loop(log_with="tensorboard", project_dir="logs", project_config=ProjectConfiguration("here", total_limit=2),
              kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True), InitProcessGroupKwargs()],
              dataloader_config=DataLoaderConfiguration(split_batches=True)), ""),
        (Loop(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]), "Accelerator does not take kwa"),
        (Loop(dataloader_config=DataLoaderConfiguration(even_batches=False)), "Accelerator got a dataloader_config with even"),
        (changed("loader", lambda: DataLoader(Endless(), batch_size=2)), "accelerator.prepare() got a DataLoader of an It"),
        (changed("loader", lambda: DataLoader(Streamed(), batch_size=2)), "accelerator.prepare() got a DataLoader of an It"),
        (changed("loader", Endless), "accelerator.prepare() got an IterableDataset, whose samples have no index"),
        (changed("before", lambda accelerator: accelerator.get_tracker("t")), "accelerator.get_tracker is not possible in a run; use"),
        (changed("loader", lambda: DataLoader(ROWS, sampler=WeightedRandomSampler([1] * 12, 12))), "accelerator.prepare() got"),
        (changed("loader", lambda: DataLoader(ROWS, batch_size=None)), "accelerator.prepare() got a DataLoader with a batch"),
        (changed("evaluation", lambda: DataLoader(ROWS, shuffle=True)), "accelerator.prepare() got a DataLoader for evaluation"),
        (changed("evaluation", lambda: nn.Linear(1, 1)), "accelerator.prepare() got a second model; combine"),
        (changed("loader", lambda: "none"), "accelerator.epochs() was called before accelerator.prepare() got a training"),
        (changed("more", lambda optimizer: [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]), "accelerator.prepare() got a Red"),
        (changed("before", lambda accelerator: accelerator.load_state("a")), "accelerator.load_state is not possible in a run; remove"),
    ],
)  # fmt: skip
def test_what_a_run_cannot_do_is_refused_in_the_driver(tmp_path: Path, loop: Loop, sentence: str) -> None:
    if not sentence:
        job = job_of(loop, tmp_path)
        assert (job.plan.global_batch, job.plan.micro_batch) == (2, 1)
        return
    if "a training" in sentence:
        loop.evaluation = lambda: "none"  # type: ignore[method-assign]
    with pytest.raises(UndulaError) as caught:
        job_of(loop, tmp_path)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_logger_of_accelerate_works(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logger = pytest.importorskip("accelerate.logging").get_logger("script")
    monkeypatch.setattr("accelerate.state.PartialState._shared_state", {})
    monkeypatch.setattr("undula.adapters.script.job_main", lambda train, config, settings: settings({}))
    with caplog.at_level("INFO", "script"):
        launch(changed("before", lambda accelerator: logger.info(accelerator.state, main_process_only=False)))
    assert "Num processes: 4" in caplog.text
