"""A number that a script takes over all ranks for a batch, and puts into its loss, is refused in every adapter with the name of the call.

A rank has some of the batches of a step, one after another, so that it cannot have what as many processes would have at that moment.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate_kit import Loop, changed, job_of, train
from adapters_kit import train_here
from lightning_kit import tiny, train_module
from tiny_lm import Sequences, tiny_gpt
from torch import Tensor, nn
from torchmetrics import MeanMetric
from transformers import TrainerCallback
from transformers_kit import arguments

from undula.adapters.transformers import Trainer
from undula.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")
Take = Callable[[Any, Tensor], Any]
UTILITIES: dict[str, Take] = {
    "gather() of accelerate.utils": lambda _, count: accelerate.utils.gather(count),
    "reduce() of accelerate.utils": lambda _, count: accelerate.utils.reduce(count, "sum"),
    "broadcast() of accelerate.utils": lambda _, count: accelerate.utils.broadcast(count),
    "gather_object() of accelerate.utils": lambda _, count: accelerate.utils.gather_object([count]),
    "pad_across_processes() of accelerate.utils": lambda _, count: accelerate.utils.pad_across_processes(count[None]),
    "a collective of torch.distributed": lambda _, count: (dist.all_reduce(count), count)[1],
}


@pytest.mark.parametrize(
    ("name", "take"),
    [
        *UTILITIES.items(),
        ("accelerator.gather()", lambda it, count: int(it.gather(count).sum().item())),
        ("accelerator.gather()", lambda it, count: it.gather_for_metrics(count).sum().item()),
        ("accelerator.gather()", lambda it, count: it.reduce(count, "sum").item()),
        ("accelerator.gather()", lambda it, count: it.gather(it.pad_across_processes(count[None])).sum().item()),
    ],
)
def test_a_loss_of_a_trainer_of_hugging_face_does_not_depend_on_a_number_of_other_processes(
    tmp_path: Path, name: str, take: Take
) -> None:
    class Scales(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *others: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, *others, **more)
            return loss / take(self.accelerator, inputs["labels"].numel() * torch.ones(())) * 2

    def main() -> None:
        given = arguments(tmp_path / "out", max_steps=1, eval_strategy="no", gradient_accumulation_steps=1)
        Scales(model=tiny_gpt(), args=given, train_dataset=Sequences(8)).train()

    with pytest.raises(UsageError) as caught:
        train_here(main, tmp_path, virtual_workers=2)
    assert name in str(caught.value)


def test_a_sum_outside_of_a_step_of_a_trainer_is_refused(tmp_path: Path) -> None:
    class Reduces(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trainers[-1].accelerator.reduce(torch.ones(()))

    def main() -> None:
        given = arguments(tmp_path / "out", max_steps=1, eval_strategy="no")
        trainers.append(Trainer(model=tiny_gpt(), args=given, train_dataset=Sequences(8), callbacks=[Reduces()]))
        trainers[-1].train()

    trainers: list[Trainer] = []
    with pytest.raises(UsageError, match=r"^accelerator.reduce\(\) was called outside of a step of the trainer"):
        train_here(main, tmp_path)


@pytest.mark.parametrize(
    ("name", "take"),
    [
        *UTILITIES.items(),
        ("accelerator.gather() was used for a batch of the training", lambda it, count: it.gather(count)),
        ("accelerator.reduce() was used for a batch of the training", lambda it, count: it.reduce(count)),
    ],
)
@pytest.mark.parametrize("part", ["in_step", "after_step"])
def test_a_batch_of_accelerates_loop_gets_no_number_of_other_processes(
    tmp_path: Path, part: str, name: str, take: Take
) -> None:
    if part == "after_step" and "torch.distributed" in name:
        return  # all ranks meet there
    used: list[Any] = []
    loop = changed("before", lambda accelerator: used.append(accelerator))
    setattr(loop, part, lambda *_: take(used[-1], torch.ones(())))
    with pytest.raises(UsageError) as caught:
        train(loop, tmp_path)
    assert name in str(caught.value)


def test_numbers_of_all_ranks_after_an_epoch_and_in_an_evaluation_are_right(tmp_path: Path) -> None:
    found: list[Any] = []

    def after_epoch(accelerator: Any, model: nn.Module, evaluation: Any, epoch: int) -> None:
        for (x,) in evaluation:
            found.append([float(accelerator.gather(x.sum()[None])), len(accelerator.gather_for_metrics(x))])
        found.append(accelerator.reduce(torch.ones(())).item())

    train(changed("after_epoch", after_epoch), tmp_path)
    assert found == [[6.0, 2], [22.0, 2], [17.0, 1], 1.0] * 2


def test_an_evaluation_after_a_step_has_numbers_of_all_ranks(tmp_path: Path) -> None:
    used: list[Any] = []
    found: list[float] = []
    loop = Loop()
    loop.before = lambda accelerator: used.extend([accelerator, accelerator.prepare(loop.evaluation())])  # type: ignore[method-assign]

    def after_step(model: nn.Module) -> None:
        accelerator, evaluation = used[-2:]
        if accelerator.sync_gradients:
            found.extend(float(accelerator.gather(x.sum()[None])) for (x,) in evaluation)

    loop.after_step = after_step  # type: ignore[method-assign]
    train(loop, tmp_path, "plan.max_steps=2")
    assert found == [6.0, 22.0, 17.0] * 2


def test_a_function_of_accelerates_utilities_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    loop: Loop = changed("before", lambda _: accelerate.utils.broadcast_object_list([1]))
    with pytest.raises(UsageError, match=r"^broadcast_object_list\(\) of accelerate.utils was called"):
        job_of(loop, tmp_path)


@pytest.mark.parametrize(
    ("name", "take"),
    [
        ("self.all_gather() was called", lambda it, loss: it.all_gather(loss).sum()),
        ("self.all_gather() was called", lambda it, loss: it.all_gather(loss, sync_grads=True).sum()),
        ("self.trainer.strategy.reduce() was called", lambda it, loss: it.trainer.strategy.reduce(loss)),
        ("self.trainer.strategy.broadcast was read", lambda it, loss: it.trainer.strategy.broadcast(loss)),
        ("such as dist.all_reduce", lambda it, loss: (dist.all_reduce(loss), loss)[1]),
        ("compute() of a metric of torchmetrics", lambda it, loss: it.mean(loss) * it.mean.compute()),
    ],
)
def test_a_training_step_of_lightning_gets_no_number_of_other_processes(tmp_path: Path, name: str, take: Take) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        factor = take(self, loss.detach().clone())
        return loss * factor

    class Module(tiny(training_step=step)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

    with pytest.raises(UsageError) as caught:
        train_module(Module, tmp_path, virtual_workers=2)
    assert name in str(caught.value)
