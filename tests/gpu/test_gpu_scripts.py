"""Tests of datasets and scripts of other libraries on a GPU: Hugging Face's losses, and the same bits with and without loader processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from undula.state.ledger import read_ledger
from undula.storage import open_store

TESTS = Path(__file__).parents[1]
LIMIT_S = 300.0
SCRIPTS = {
    "a map-style dataset": ("chaos/map_job.py", "config.num_workers={}", "plan.max_steps=12"),
    "Hugging Face": ("chaos/trainer_job.py", "config.arguments=--steps 12 --loaders {}"),
    "Accelerate": (
        "migration/accelerate_after.py",
        "config.arguments=--epochs 1 --dropout 0.1 --shuffle --num_workers {} --output_dir .",
    ),
    "Lightning": ("chaos/lightning_job.py", "config.num_workers={}", "plan.max_steps=12"),
}
LIBRARIES = {"Hugging Face": "transformers", "Lightning": "pytorch_lightning"}


def trained(script: str, folder: Path, *overrides: str, env: dict[str, str] | None = None) -> list[list[Any]]:
    """Train a script in a process of its own, and return the losses and the digests of the weights."""
    folder.mkdir()
    command = [sys.executable, str(TESTS / "alone.py"), str(TESTS / script), f"runs={folder}", "name=run", *overrides]
    done = subprocess.run(
        command, env={**os.environ, **(env or {})}, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = read_ledger(open_store(f"{folder}/run")).steps
    return [steps[name].to_pylist() for name in ("loss", "weights_digest")]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", SCRIPTS)
def test_loader_processes_change_no_bit_on_a_gpu(kind: str, tmp_path: Path) -> None:
    if kind in LIBRARIES:
        pytest.importorskip(LIBRARIES[kind])
    script, *overrides = SCRIPTS[kind]
    losses, digests = trained(script, tmp_path / "0", *(each.format(0) for each in overrides))
    assert trained(script, tmp_path / "2", *(each.format(2) for each in overrides)) == [losses, digests]
    assert any(digests)
    on_cpu, _ = trained(
        script, tmp_path / "cpu", *(each.format(0) for each in overrides), env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert losses != on_cpu, "the GPU draws other random numbers for dropout"
    assert losses == pytest.approx(on_cpu, rel=0.3)


@pytest.mark.parametrize("more", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_trainer_on_a_gpu_has_the_losses_of_hugging_faces(
    device: torch.device, tmp_path: Path, more: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    from adapters_kit import train_here
    from transformers_kit import Trained, arguments

    from undula.adapters.transformers import Trainer

    found = []
    for kind in (transformers.Trainer, Trainer):
        script = Trained(kind, arguments(tmp_path / kind.__module__, use_cpu=False, **more))
        if kind is Trainer:
            train_here(script, tmp_path)
        else:
            script()
        assert {value.device for value in script.weights.values()} == {device}
        found.append(script)
    theirs, ours = found
    assert ours.watch.calls == theirs.watch.calls
    for our, their in zip(ours.logs, theirs.logs, strict=True):
        assert our == pytest.approx(their, abs=2e-3 if more else 1e-5)
