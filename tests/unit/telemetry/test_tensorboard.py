"""Tests of the TensorBoard files: a flush writes all values, and a failing storage blocks nothing."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from undula.errors import StorageError
from undula.storage import Store
from undula.telemetry import tensorboard as board
from undula.telemetry.tensorboard import TensorBoardWriter


def steps_in(folder: Path) -> list[int]:
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return [point.step for point in found.Scalars("loss/train")]


def test_all_values_are_written_in_files_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "FILE_BYTES", 2000)
    written = TensorBoardWriter(Store(str(tmp_path)), attempt=1, start=0)
    for step in range(200):
        written.add(step, {"loss/train": 1 / (step + 1)})
        if step % 17 == 0:
            written.flush()
    written.flush()
    files = list((tmp_path / "tensorboard").iterdir())
    assert len(files) > 3
    assert max(file.stat().st_size for file in files) < 2200
    assert len(written._files) == 1  # values that are stored are not kept in memory
    assert steps_in(tmp_path) == list(range(200))


def test_a_later_attempt_replaces_the_steps_from_its_start_on(tmp_path: Path) -> None:
    for attempt, steps in ((1, range(10)), (2, range(6, 12))):
        written = TensorBoardWriter(Store(str(tmp_path)), attempt, start=steps.start)
        for step in steps:
            written.add(step, {"loss/train": float(attempt)})
        written.flush()
    assert steps_in(tmp_path) == list(range(12))


def test_a_temporary_failure_of_the_storage_loses_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = TensorBoardWriter(Store(str(tmp_path)), attempt=1, start=0)

    def full(*_: object) -> None:
        raise StorageError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", full)
        for step in range(300):
            written.add(step, {"loss/train": 1.0})
        with pytest.raises(StorageError):
            written.flush()
    written.flush()
    assert steps_in(tmp_path) == list(range(300))
