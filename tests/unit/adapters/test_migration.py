"""Tests of the scripts before and after a migration: few lines differ, and the losses are the same."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters_kit import changed_lines, train_here

FOLDER = Path(__file__).parents[2] / "migration"


@pytest.mark.parametrize("name", ["transformers", "accelerate"])
def test_a_script_changes_in_three_lines(name: str) -> None:
    """Without its docstring, which says how it is started."""
    before, after = ((FOLDER / f"{name}_{which}.py").read_text().splitlines()[1:] for which in ("before", "after"))
    assert max(changed_lines(before, after)) == 3


def logs_in(folder: Path) -> list[dict[str, Any]]:
    """Return what the trainer logged, without durations."""
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda file: file.stat().st_mtime)
    logs = json.loads(states[-1].read_text())["log_history"]
    return [{key: value for key, value in log.items() if "loss" in key or key == "step"} for log in logs]


def test_a_script_with_hugging_faces_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (runpy.run_path(str(FOLDER / f"transformers_{which}.py"))["main"] for which in ("before", "after"))
    monkeypatch.setattr(sys, "argv", ["script", str(tmp_path / "theirs")])
    torch.set_num_threads(1)
    before()
    train_here(after, tmp_path, f"config.arguments={tmp_path / 'ours'}")
    theirs, ours = logs_in(tmp_path / "theirs"), logs_in(tmp_path / "ours")
    assert len(theirs) == len(ours) > 5
    for one, other in zip(theirs, ours, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
