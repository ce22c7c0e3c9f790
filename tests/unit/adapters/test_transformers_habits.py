"""Tests of subclasses of Hugging Face's Trainer that touch the gradients of an open step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters_kit import columns, train_here
from torch import nn
from transformers import TrainingArguments

from undula.adapters.transformers import Trainer
from undula.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")


class Points:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([index / 32]), "labels": torch.tensor([3.0])}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(1, 1)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        return {"loss": (self.line(x) - labels).square().mean()}


class ZeroesBefore(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.optimizer.zero_grad()
        self.model.zero_grad()
        return super().training_step(model, inputs, num_items_in_batch)


class ZeroesAfter(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.optimizer.zero_grad()
        return loss


class Clips(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss


class AddsLoss(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model(**inputs)["loss"].backward()
        return super().training_step(model, inputs, num_items_in_batch)


def losses(kind: type[Any], folder: Path) -> list[float]:
    def main() -> None:
        arguments = TrainingArguments(
            output_dir=str(folder / "out"), per_device_train_batch_size=2, max_steps=4, learning_rate=0.05, optim="sgd",
            lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        kind(model=Line(), args=arguments, train_dataset=Points()).train()

    folder.mkdir()
    return columns(train_here(main, folder, virtual_workers=4), "loss")[0]


def test_zero_grad_before_the_backward_pass_deletes_no_gradient_of_a_step(tmp_path: Path) -> None:
    assert losses(ZeroesBefore, tmp_path / "zeroes") == losses(Trainer, tmp_path / "plain")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (ZeroesAfter, "zero_grad() was called after step.backward() in step 0"),
        (Clips, "clip_grad_norm_() changed a gradient of an open step"),
        (AddsLoss, "loss.backward() was called in step 0"),
    ],
)
def test_a_trainer_that_changes_gradients_of_an_open_step_is_refused(
    tmp_path: Path, kind: type[Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        losses(kind, tmp_path / "run")
    assert str(caught.value).startswith(sentence)
