"""Tests of the process of a trial: the trial gets the end of its run in any case."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from undula.data.spec import DataSpec, ValidationSpec
from undula.driver.record import LaunchSpec
from undula.elastic.pure.fleet import Work
from undula.elastic.pure.spec import WorkersSpec
from undula.errors import StorageError
from undula.parallel.spec import GradientSpec
from undula.plan.plan import PlanSpec
from undula.plan.schedule import ScheduleSpec
from undula.state.directory import JOB_FILE
from undula.state.events import ValidationEvent
from undula.state.spec import CheckpointSpec
from undula.study import process
from undula.study.process import TrialProcess, TrialSpec
from undula.train.job import Job


def config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a trial whose record is in `folder`."""
    (folder / JOB_FILE).write_text(json.dumps({"id": "0123abcd", "name": "trial", "began": 0.0, "spec": {}}))
    job = Job(
        name="trial",
        run_url=str(folder),
        data=DataSpec(train="/nowhere"),
        plan=PlanSpec(),
        schedule=ScheduleSpec(),
        gradient=GradientSpec(),
        validation=ValidationSpec(),
        checkpoint=CheckpointSpec(),
        deterministic=False,
        config=None,
    )
    spec = TrialSpec(LaunchSpec(job, WorkersSpec(gpus=0), None, Work(1, 0.0)), "validation_loss", is_packed=True)
    return {"spec": ray.cloudpickle.dumps(spec)}  # type: ignore[no-untyped-call]


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], TrialProcess]:
    """Process with a trial whose run only calls a function with its listener."""

    class Training:
        def __init__(self, train: Callable[[Any], None], job: Job, publish: Any, device: torch.device):
            self._train, self._publish = train, publish

        def __call__(self) -> None:
            self._train(self._publish)

        @staticmethod
        def leave() -> None:
            """Do nothing, because there are no steps."""

    monkeypatch.setattr(process, "SingleProcess", Training)
    monkeypatch.setattr(process, "STORAGE_PAUSES_S", (0.0, 0.0))
    for name in ("hide_unreserved_gpus", "refuse_unseen_gpus", "reserved_device"):  # which ask Ray
        monkeypatch.setattr(process, name, lambda: None)

    def begun(train: Callable[[Any], None]) -> TrialProcess:
        made = TrialProcess.__new__(TrialProcess)
        made.setup(config(tmp_path), train)
        return made

    return begun


Begin = Callable[[Callable[[Any], None]], TrialProcess]


def raised(error: BaseException) -> Callable[[Any], None]:
    def train(publish: Any) -> None:
        raise error

    return train


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("width"), "KeyError: 'width'"),
        (AssertionError(), "AssertionError"),
        (ValueError("one\ntwo"), "ValueError: one two"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_an_error_of_the_run_fails_its_trial(trial: Begin, error: BaseException, message: str) -> None:
    news = trial(raised(error)).step()
    assert (news["state"], news["message"], news["done"]) == ("failed", message, True)


def test_a_temporary_failure_of_the_storage_fails_no_trial(trial: Begin) -> None:
    failures = [StorageError("away"), StorageError("away")]

    def train(publish: Any) -> None:
        if failures:
            raise failures.pop()
        publish(ValidationEvent(1.0, 9, step=2))

    made = trial(train)
    assert [made.step()["state"], made.step()["state"]] == ["running", "complete"]
    assert trial(raised(StorageError("gone for good"))).step()["message"] == "StorageError: gone for good"


def test_a_packed_trial_trains_on_what_it_has_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may see a GPU that the trial has not reserved."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(process, "hide_unreserved_gpus", lambda: None)
    monkeypatch.setattr(process, "reserved_device", lambda: torch.device("cpu"))
    made = TrialProcess.__new__(TrialProcess)
    made.setup(config(tmp_path), lambda run: None)
    monkeypatch.setattr(process, "_run_training", lambda *_: None)
    made._begin()
    assert made._here is not None
    assert made._here.device == torch.device("cpu")


def test_the_next_trial_of_a_process_starts_after_the_former_one_has_stopped(trial: Begin, tmp_path: Path) -> None:
    leaves, order = threading.Event(), []

    def train(publish: Any) -> None:
        order.append("begun")
        publish(ValidationEvent(1.0, 9, step=0))
        leaves.wait(10)
        order.append("left")

    made = trial(train)
    assert made.step()["state"] == "running"
    assert made.reset_config(config(tmp_path))
    leaves.set()
    assert [made.step()["state"], made.step()["state"]] == ["running", "complete"]
    assert order == ["begun", "left", "begun", "left"]


def test_a_process_without_a_step_trains_nothing(trial: Begin) -> None:
    """Tune drops a process that is still starting if another one becomes free. Both would train the same run."""
    begun = []
    dropped = trial(lambda _publish: begun.append(1))
    dropped.cleanup()
    assert not begun
