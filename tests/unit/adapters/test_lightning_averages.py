"""Averages of the weights, and other tensors that callbacks keep: right in buffers of the module, and refused or named beside it."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from alone import train_alone
from lightning_kit import JOB, PAGE, Tiny, tiny, train_module
from torch.optim.swa_utils import AveragedModel

from undula.adapters.lightning import fit
from undula.errors import UsageError
from undula.state.events import ValidationEvent, WarningEvent
from undula.state.ledger import Ledger, events_of, read_ledger
from undula.testing import conformance

CALLBACK = "class AverageWeights" + PAGE.read_text().split("class AverageWeights", 1)[1].split("```", 1)[0]
SCRIPT = f"""
import pytorch_lightning as pl
import torch
from lightning_kit import tiny
from undula.adapters.lightning import Trainer, launch

{CALLBACK}

def main():
    torch.manual_seed(3)
    # Tiny itself counts the validation batches of its rank.
    make = tiny(on_validation_epoch_end=lambda self: None)
    Trainer(max_epochs=3, callbacks=[AverageWeights()]).fit(make())


if __name__ == "__main__":
    launch(main)
"""


def defined_callback() -> Any:
    names: dict[str, Any] = {"pl": pl}
    exec(CALLBACK, names)
    return names["AverageWeights"]


def validations(folder: Path, world_size: int) -> list[tuple[int, float]]:
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "script.yaml").write_text("{name: run, plan: {virtual_workers: 2}, validation: {every_steps: 1}}")
    command = [sys.executable, str(folder / "script.py"), f"runs={folder}", "name=run", "deterministic=true"]
    ledger = read_ledger(train_alone(command, world_size))
    return [(event.step, event.loss) for event in events_of(ledger.events, ValidationEvent)]


def test_the_callback_of_the_page_has_the_same_average_at_any_number_of_ranks(tmp_path: Path) -> None:
    one, two = validations(tmp_path / "1", 1), validations(tmp_path / "2", 2)
    assert one == two
    assert len({loss for _, loss in one[1:]}) > 3


def test_the_callback_of_the_page_resumes_exactly(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text(JOB)
    conformance.check(
        lambda run: fit(run, Tiny(), callbacks=[defined_callback()()]), tmp_path / "digits.yaml", f"runs={tmp_path}"
    )


class Swaps(pl.Callback):
    """Average that begins as a copy of the weights and is in the model while it is validated."""

    def moves(self, module: Any) -> None:
        for name, value in module.state_dict().items():
            self.means[name].mul_(0.9).add_(value, alpha=0.1)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.means = copy.deepcopy(module.state_dict())

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.moves(module)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = copy.deepcopy(module.state_dict())
        module.load_state_dict(self.means)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        module.load_state_dict(self.kept)


class Replaces(Swaps):
    """Average that each batch replaces, and that is written past torch's version counters."""

    def moves(self, module: Any) -> None:
        self.means = {name: self.means[name] * 0.9 + value * 0.1 for name, value in module.state_dict().items()}

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = copy.deepcopy(module.state_dict())
        for name, parameter in module.named_parameters():
            parameter.data = self.means[name].clone()


class Late(Swaps):
    """Average that begins after some steps."""

    means: Any = None

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        pass

    def moves(self, module: Any) -> None:
        if trainer_step(module) >= 3:
            self.means = self.means or copy.deepcopy(module.state_dict())
            super().moves(module)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = copy.deepcopy(module.state_dict())
        module.load_state_dict(self.means or self.kept)


class Copies(Swaps):
    """Average of torch in an attribute."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.means = AveragedModel(module.net)

    def moves(self, module: Any) -> None:
        self.means.update_parameters(module.net)

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        module.net.load_state_dict(self.means.module.state_dict())

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = copy.deepcopy(module.state_dict())


def trainer_step(module: Any) -> int:
    return int(module.trainer.global_step)


@pytest.mark.parametrize("make", [Swaps, Replaces, Late, Copies])
def test_an_average_that_a_callback_keeps_and_validates_with_is_refused(tmp_path: Path, make: type[Swaps]) -> None:
    sentence = (
        rf"^{make.__name__}.means changes while the run trains, and the hooks of a validation put it into the model, so that means would "
        r"depend on the number of workers and begin anew after a resume; keep an average of weights in buffers of the module"
    )
    with pytest.raises(UsageError, match=sentence):
        train_module(Tiny, tmp_path, callbacks=make())


def test_an_average_that_the_module_keeps_and_validates_with_is_refused(tmp_path: Path) -> None:
    swaps = Swaps()

    def on_train_batch_end(self: Any, *_: Any) -> None:
        self.means = [p.detach() * 0.5 for p in self.parameters()]

    def on_validation_start(self: Any) -> None:
        for parameter, mean in zip(self.parameters(), getattr(self, "means", ()), strict=False):
            parameter.data.copy_(mean)

    make = tiny(on_train_batch_end=on_train_batch_end, on_validation_start=on_validation_start)
    with pytest.raises(UsageError, match=r"^Tiny.means changes while the run trains"):
        train_module(make, tmp_path)
    assert not vars(swaps)


def warned(ledger: Ledger) -> list[str]:
    return [each.detail for each in events_of(ledger.events, WarningEvent) if each.code == "state_beside_model"]


def test_tensors_of_a_callback_that_a_step_changes_are_an_event(tmp_path: Path) -> None:
    class Sums(pl.Callback):
        def __init__(self) -> None:
            self.sums = {"loss": torch.zeros(2)}
            self.center, self.constant, self.last = torch.zeros(3), torch.ones(2), None
            self.outputs: list[Any] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.sums["loss"] += outputs["loss"]
            self.center = self.center * 0.9 + 0.1
            self.last = outputs["loss"]
            self.outputs.append(outputs["loss"])

    assert warned(train_module(Tiny, tmp_path, callbacks=Sums())) == ["Sums.sums", "Sums.center"]


def test_callbacks_that_show_outputs_or_have_a_right_average_are_left_alone(tmp_path: Path) -> None:
    class Shows(pl.Callback):
        last: Any = None

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.module, self.views = module, [parameter.detach() for parameter in module.parameters()]

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.last = {
                "weights": [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
            }

    assert warned(train_module(Tiny, tmp_path, callbacks=[Shows(), defined_callback()()])) == []
