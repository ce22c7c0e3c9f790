"""Tests of what holds for the scripts of all adapters: few lines change, the losses stay, and a worker can rehearse them."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_kit import changed
from adapters_kit import changed_lines, job_of_script, train_here
from lightning_kit import blocks, defined
from transformers_kit import HAS_STRATEGY, Trained, arguments

from undula.adapters.script import Script
from undula.adapters.transformers import Trainer
from undula.telemetry.messages import Message
from undula.train.dry_run.rehearsal import rehearse
from undula.train.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")
FOLDER = Path(__file__).parents[2] / "migration"


@pytest.mark.parametrize("name", ["transformers", "accelerate", "lightning"])
def test_a_script_changes_in_three_lines(name: str) -> None:
    """Without its docstring, which says how it is started."""
    files = [FOLDER / f"{name}_{which}.py" for which in ("before", "after")]
    before, after = blocks()[:2] if name == "lightning" else [file.read_text().partition("\n")[2] for file in files]
    assert max(changed_lines(before.splitlines(), after.splitlines())) == 3


def logs_in(folder: Path) -> list[dict[str, Any]]:
    """Return what the trainer logged, without durations."""
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda file: file.stat().st_mtime)
    logs = json.loads(states[-1].read_text())["log_history"]
    return [{key: value for key, value in log.items() if "loss" in key or key == "step"} for log in logs]


@pytest.mark.skipif(not HAS_STRATEGY, reason="the script asks for the order of its dataset")
def test_a_script_with_hugging_faces_trainer_has_its_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (runpy.run_path(str(FOLDER / f"transformers_{which}.py"))["main"] for which in ("before", "after"))
    monkeypatch.setattr(sys, "argv", ["script", str(tmp_path / "theirs")])
    before()
    train_here(after, tmp_path, f"config.arguments={tmp_path / 'ours'}")
    theirs, ours = logs_in(tmp_path / "theirs"), logs_in(tmp_path / "ours")
    assert len(theirs) == len(ours) > 5
    for one, other in zip(theirs, ours, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def clips_and_logs(accelerator: Any, model: Any) -> None:
    accelerator.log({"rate": 1.0})
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        lambda folder: Trained(Trainer, arguments(folder / "out", eval_on_start=True, eval_steps=1, save_steps=1)),
        lambda folder: changed("in_step", clips_and_logs),
        lambda folder: defined(blocks()[1])["main"],
    ],
    ids=["transformers", "accelerate", "lightning"],
)
def test_a_worker_rehearses_a_script_before_it_joins_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[[Path], Any], deterministic: bool
) -> None:
    main, messages, updated = script(tmp_path), list[Message](), list[Step]()
    update = Step.update
    monkeypatch.setattr(Step, "update", lambda step: (update(step), updated.append(step))[0])
    job = job_of_script(main, tmp_path, f"deterministic={deterministic}", virtual_workers=2)
    rehearse(Script(main), job, torch.device("cpu"), messages.append)
    assert (messages, len(updated)) == ([], 1)
    assert not list(tmp_path.glob("out/checkpoint-*"))
