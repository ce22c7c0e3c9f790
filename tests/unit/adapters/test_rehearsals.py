"""Tests that a script of each adapter goes through a rehearsal, in which a worker compiles the model before it joins a group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_kit import changed
from adapters_kit import job_of_script
from lightning_pair import blocks, defined
from transformers_kit import Trained, arguments

from undula.adapters.script import Script
from undula.adapters.transformers import Trainer
from undula.telemetry.messages import Message
from undula.train.job import Job
from undula.train.rehearsal import rehearse
from undula.train.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Job], list[Message]]:
    """Function that rehearses a script to the end of its step, and returns the messages to the user."""
    updated = []
    update = Step.update
    monkeypatch.setattr(Step, "update", lambda step: (update(step), updated.append(step))[0])

    def rehearsed(train: Any, job: Job) -> list[Message]:
        found: list[Message] = []
        rehearse(train, job, torch.device("cpu"), found.append)
        assert len(updated) == 1, found
        return found

    return rehearsed


def test_a_script_with_hugging_faces_trainer_is_rehearsed(told: Any, tmp_path: Path) -> None:
    main = Trained(Trainer, arguments(tmp_path, eval_on_start=True, eval_steps=1, save_steps=1))
    job = job_of_script(main, tmp_path, virtual_workers=2)
    assert told(Script(main), job) == []
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_loop_for_accelerate_is_rehearsed(told: Any, tmp_path: Path, deterministic: bool) -> None:
    def in_step(accelerator: Any, model: Any) -> None:
        accelerator.log({"rate": 1.0})
        accelerator.clip_grad_norm_(model.parameters(), 1.0)

    loop = changed("in_step", in_step)
    job = job_of_script(loop, tmp_path, f"deterministic={deterministic}", virtual_workers=2)
    assert told(Script(loop), job) == []


def test_a_module_of_lightning_is_rehearsed(told: Any, tmp_path: Path) -> None:
    main = defined(blocks()[1])["main"]
    assert told(Script(main), job_of_script(main, tmp_path, virtual_workers=2)) == []
