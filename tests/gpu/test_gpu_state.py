"""Tests of the state of a model on a GPU: its snapshots, and whether a run on the GPU resumes exactly."""

from pathlib import Path

import pytest
import torch
from conformance_cases import ALL, write_job

from undula.recovery.snapshot import find_snapshots
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.state.pieces import rank_state
from undula.testing.conformance import check

STEPS = ("plan.max_steps=4",)


def test_a_snapshot_has_the_values_from_before_the_next_change(device: torch.device, tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path / "run", "plan", every_steps=1)
    weights = torch.zeros(2**20, device=device)
    held = rank_state({"model.w": weights})
    for step in range(1, 5):
        for _ in range(100):
            weights += 0.01  # these kernels may still be running when the copy is requested
        expected = weights.clone()
        writer.begin(step, held, {}, [])
        writer.wait()
        weights.fill_(-1.0)
        newest = max(find_snapshots(tmp_path / "run", "plan"), key=lambda found: found.age)
        assert newest.age[1] == step
        assert torch.equal(newest.load().pieces["model.w"].tensor, expected.cpu())
        weights.copy_(expected)
    writer.close()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["plain", "BatchNorm", "a branch that some steps use", "a buffer that is replaced"])
def test_a_run_on_a_gpu_resumes_exactly_after_every_step(name: str, deterministic: bool, tmp_path: Path) -> None:
    check(ALL[name], write_job(tmp_path), *STEPS, f"deterministic={str(deterministic).lower()}")
