"""Tests of Hugging Face's Trainer in groups that end at any moment: the next one repeats what was not finished."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters_kit import columns, job_of_script, renamed, store_of, train_group, train_here
from tiny_lm import Sequences, tiny_gpt
from transformers import DefaultDataCollator, EarlyStoppingCallback, TrainerCallback, default_data_collator
from transformers_kit import Trained, arguments, train_in_groups

from undula.adapters.transformers import Trainer
from undula.errors import UndulaError
from undula.state.events import EndEvent, ValidationEvent, WarningEvent
from undula.state.ledger import events_of, read_ledger
from undula.train.job import Job

pytestmark = pytest.mark.usefixtures("one_thread")


def events(job: Job) -> tuple[list[int | None], list[int | None]]:
    """Return the steps of the validations and of the end of a run."""
    found = read_ledger(store_of(job)).events
    return [each.step for each in events_of(found, ValidationEvent)], [each.step for each in events_of(found, EndEvent)]


def test_a_group_may_end_in_an_evaluation_or_at_a_boundary(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", max_steps=14, eval_steps=4, save_strategy="no", logging_steps=3)
    undisturbed = Trained(Trainer, args, partial(tiny_gpt, dropout=0.1))
    expected = train_here(undisturbed, tmp_path, "deterministic=true")
    job = renamed(expected, "disturbed")
    script = train_in_groups(
        job, lambda ends: Trained(Trainer, args, undisturbed.model, callbacks=[ends]), (4, None), (None, 9)
    )
    names = ("step", "loss", "grad_norm", "lr", "weights_digest")
    assert columns(job, *names) == columns(expected, *names)
    assert script.logs == undisturbed.logs


def test_a_smoke_test_evaluates_and_saves_at_its_end(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", max_steps=14, eval_steps=10, save_steps=10)
    job = replace(job_of_script(Trained(Trainer, args), tmp_path), ends_after=3)
    train_group(Trained(Trainer, args), job)
    assert columns(job, "step") == [[0, 1, 2]]
    assert events(job) == ([3], [3])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-3"]


def test_an_evaluation_that_stops_the_training_is_repeated_before_another_step(tmp_path: Path) -> None:
    args = arguments(
        tmp_path / "out",
        learning_rate=1e-12,
        max_steps=20,
        eval_steps=2,
        save_strategy="no",
        metric_for_best_model="loss",
    )

    def script(*callbacks: Any) -> Trained:
        return Trained(Trainer, args, callbacks=[EarlyStoppingCallback(2, early_stopping_threshold=1.0), *callbacks])

    expected = train_here(script(), tmp_path)
    job = renamed(expected, "disturbed")
    train_in_groups(job, script, (6, None), (6, None))
    assert columns(job, "step") == columns(expected, "step") == [[0, 1, 2, 3, 4, 5]]
    assert events(job) == events(expected) == ([2, 4, 6], [6])


def test_the_last_evaluation_is_repeated_until_it_is_done(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", max_steps=6, eval_steps=2, save_strategy="no")
    undisturbed = Trained(Trainer, args)
    expected = train_here(undisturbed, tmp_path)
    job = renamed(expected, "disturbed")
    script = train_in_groups(job, lambda ends: Trained(Trainer, args, callbacks=[ends]), (6, None), (6, None))
    assert events(job) == events(expected) == ([2, 4, 6], [6])
    assert script.logs == undisturbed.logs


class Collates:
    """Data collator with a generator of its own."""

    def __init__(self) -> None:
        self.random = torch.Generator()

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        torch.rand((), generator=self.random)
        return dict(default_data_collator(rows))


class Counts(TrainerCallback):
    """Callback with a sum over the steps, and the last batch that it has seen."""

    def __init__(self) -> None:
        self.total, self.last = torch.zeros(1), None

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.total += 1
        self.last = torch.ones(2)


class Centers(Trainer):
    """Trainer with a mean of outputs that its loss uses."""

    center = torch.zeros(())
    best: Any = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        self.center = 0.9 * self.center + 0.1 * outputs.logits.detach().mean()
        self.best = outputs.loss.detach()
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_what_steps_change_in_attributes_is_an_event(tmp_path: Path) -> None:
    def main() -> None:
        args = arguments(tmp_path / "out", max_steps=4, eval_strategy="no", save_strategy="no")
        trainer = Centers(tiny_gpt(), args, Collates(), Sequences(100), callbacks=[Counts()])
        trainer.center = torch.zeros(())
        trainer.train()

    found = events_of(read_ledger(store_of(train_here(main, tmp_path))).events, WarningEvent)
    told = [each.detail for each in found if each.code == "state_beside_model"]
    assert sorted(told) == ["Centers.center", "Centers.data_collator", "Counts.total"]


def test_a_trainer_of_hugging_face_has_nothing_to_tell(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", max_steps=4, eval_steps=2, save_strategy="no", logging_steps=1)
    found = events_of(read_ledger(store_of(train_here(Trained(Trainer, args), tmp_path))).events, WarningEvent)
    assert not any(each.code == "state_beside_model" for each in found)


def test_a_collator_with_a_seed_of_its_own_is_refused(tmp_path: Path) -> None:
    collator = DefaultDataCollator()
    collator.seed = 42  # as of DataCollatorForLanguageModeling, which would need a tokenizer

    def main() -> None:
        args = arguments(tmp_path / "out", eval_strategy="no")
        Trainer(tiny_gpt(), args, collator, Sequences(9)).train()

    with pytest.raises(UndulaError, match=r"^the DefaultDataCollator has seed=42, with which each worker draws"):
        job_of_script(main, tmp_path)
