"""Tests that a script finds the same run in the driver's checks, in a rehearsal and in training: one type, over different sessions."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_job import cpu_run, write_numbers
from torch import nn
from torch.utils.data import TensorDataset

from undula.config.job import LoadedSpec, load_spec
from undula.driver.model_facts import script_facts
from undula.driver.preflight import check_job, examine
from undula.driver.record import job_of
from undula.errors import SpecError, UsageError
from undula.recovery.worker_state import LeaveGroup, WorkerState
from undula.state.events import RehearsalEvent
from undula.storage import Store
from undula.telemetry.hub import Hub
from undula.telemetry.messages import Message
from undula.train.dry_run.rehearsal import RehearsalSession, rehearse
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import local_world

CPU = torch.device("cpu")
Uses = dict[str, Callable[[Any], object]]


def taken(run: Run) -> None:
    """Register two parts of the state under one name."""
    for _ in range(2):
        run.state("part", int, lambda value, repeats: None)


BEFORE_THE_MODEL: Uses = {
    "keep": lambda run: run.keep("list", list),
    "state": taken,
    "gather": lambda run: run.gather(7)[run.rank],
    "alive": lambda run: run.alive(),
    "preflight": lambda run: run.preflight(lambda given: None),
    "map": lambda run: run.map(lambda sample, random: sample),
    "dataset": lambda run: run.dataset(TensorDataset(torch.ones(3))),
    "optimizer": lambda run: run.optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters())),
    "steps": lambda run: next(run.steps()),
    "restore": lambda run: run.restore(),
    "log": lambda run: run.log({"x": 1.0}),
    "save": lambda run: run.save(),
    "warn_of_state": lambda run: run.warn_of_state("Average.values"),
    "stop": lambda run: run.stop("it is enough"),
    "validated": lambda run: run.validated({"loss": 1.0}, 3),
    "copies": lambda run: run.copies(),
    "hand_over": lambda run: run.hand_over(),
    "free": lambda run: run.free(),
}
"""A use of each method of a run that a script may call before `run.model`."""
BETWEEN_STEPS = ("keep", "gather", "alive", "log", "save", "warn_of_state", "validated", "copies", "stop")
"""Methods of a run that a script may call after a step."""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedSpec:
    write_numbers(tmp_path, 48)
    file = tmp_path / "job.yaml"
    job = {"name": "job", "runs": str(tmp_path), "data": {"train": f"{tmp_path}/data"}, "gradient": {"max_norm": 1.0}}
    file.write_text(json.dumps({**job, "plan": {"global_batch": 20, "epochs": 2}}))
    return load_spec(file)


@pytest.fixture
def job(loaded: LoadedSpec) -> Job:
    return job_of(loaded, "run")


@pytest.fixture
def runs(loaded: LoadedSpec, job: Job) -> Iterator[list[Run]]:
    """The run of a worker, that of a rehearsal, and that of the driver's checks."""
    probes: list[Run] = []
    script_facts(probes.append, loaded, 48)
    with local_world(CPU):
        runs = [cpu_run(job), Run(RehearsalSession(job, CPU, WorkerState())), *probes]
        yield runs
        for run in runs:
            run.free()


def members(one: object) -> set[str]:
    return {name for name in dir(one) if not name.startswith("_")}


def values(one: object, names: set[str]) -> dict[str, Any]:
    return {name: getattr(one, name) for name in names if not callable(getattr(one, name))}


def refusal(use: Callable[[Any], object], run: Run) -> str | None:
    """Return the type of the error with which a run refuses something; None if it does it."""
    try:
        use(run)
    except (UsageError, SpecError) as error:
        return type(error).__name__
    return None


def test_each_method_of_a_run_is_used_here(runs: list[Run]) -> None:
    methods = {name for name in members(runs[0]) if callable(getattr(runs[0], name))}
    assert {*BEFORE_THE_MODEL, "model"} == methods


def test_values_of_a_run_are_the_same_in_rehearsals_and_checks(runs: list[Run]) -> None:
    names = members(runs[0]) - {"rank", "world_size", "device"}
    assert values(runs[1], names) == values(runs[2], names) == values(runs[0], names)


@pytest.mark.parametrize("name", BEFORE_THE_MODEL)
def test_what_a_script_may_do_before_its_model_is_the_same_in_rehearsals_and_checks(runs: list[Run], name: str) -> None:
    real, rehearsed, checked = (refusal(BEFORE_THE_MODEL[name], run) for run in runs)
    assert checked == real
    assert rehearsed in (real, None)


def seen_in_a_step(run: Run) -> list[dict[str, Any]]:
    """Train one step, use each member of it, and return its attributes before, in and after it, and what its methods return."""
    model = run.model(nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    assert run.restore() == 0
    steps = run.steps()
    step = next(steps)
    names = members(step)
    seen = [values(step, names)]
    returned = {"load": len(step.load()), "total": step.total(3)}
    for batch in step.batches():
        seen.append(values(step, names))
        step.backward((model(batch["x"][:, None] / 48) + 1).square().mean())
        model.zero_grad()
        step.keep_gradients()
        step.log(rows=len(batch["x"]))
    returned["reduce"] = step.reduce()
    assert all(parameter.grad is not None for parameter in model.parameters())
    step.update()
    assert all(parameter.grad is None for parameter in model.parameters())
    seen.append(values(step, names))
    for name in BETWEEN_STEPS:
        BEFORE_THE_MODEL[name](run)
    with pytest.raises((LeaveGroup, StopIteration)):
        next(steps)
    return [*seen, returned]


def test_each_member_of_a_step_has_values_of_the_same_type_in_a_rehearsal(runs: list[Run]) -> None:
    real, rehearsed = (seen_in_a_step(run) for run in runs[:2])
    types = [
        {
            json.dumps({name: type(value).__name__ for name, value in members.items()}, sort_keys=True)
            for members in seen
        }
        for seen in (real, rehearsed)
    ]
    assert types[0] == types[1]


def told_by_rehearsal(train: Callable[[Run], None], job: Job) -> list[Message]:
    messages: list[Message] = []
    rehearse(train, job, CPU, messages.append)
    return messages


def test_a_script_that_fails_in_a_rehearsal_is_told_once_for_all_workers(job: Job, tmp_path: Path) -> None:
    def train(run: Run) -> None:
        raise KeyError("width")

    def ends(run: Run) -> None:
        raise SystemExit("no GPU")

    hub = Hub(Store(str(tmp_path / "run")))
    for script in (train, train, ends):
        for message in told_by_rehearsal(script, job):
            hub.publish(message)
    (event,) = hub.read(0)[1]
    assert isinstance(event, RehearsalEvent)
    assert event.problem == "KeyError: 'width'"


def test_what_a_rehearsal_keeps_is_closed_with_it(job: Job) -> None:
    closed: list[str] = []
    assert told_by_rehearsal(lambda run: run.keep("file", lambda: "open", closed.append), job) == []
    assert closed == ["open"]


def test_the_user_is_told_when_the_model_could_not_be_checked(
    loaded: LoadedSpec, caplog: pytest.LogCaptureFixture
) -> None:
    def train(run: Run) -> None:
        raise RuntimeError("no GPU here")

    assert examine(train, loaded, check_job(loaded)).model is None
    assert "the script failed with RuntimeError before run.model(): no GPU here" in caplog.text


def test_a_script_of_its_own_dataset_reads_the_run_before_it(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("{name: x, plan: {global_batch: 4}}")
    loaded = load_spec(file)
    seen = []

    def train(run: Run) -> None:
        seen.extend([run.compute, run.url, run.gather(run.base_lr)])
        run.dataset(TensorDataset(torch.arange(48.0)))
        run.model(nn.Linear(1, 1))

    assert examine(train, loaded, check_job(loaded)).model is not None
    assert seen == ["fp32", loaded.spec.run_url, [loaded.spec.schedule.base_lr]]
