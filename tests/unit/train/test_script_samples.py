"""Tests of runs on a dataset of the script: the same bits with and without loader processes and at any world size, and what is refused."""

import multiprocessing
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pytest
import torch
from drawn_data import ROWS, Drawn, DrawnAtOnce, drawn_job
from feature_scripts import on_drawn
from numbers_job import cpu_run, numbers_job, refusal
from ranks import on_ranks
from torch import nn

from undula.data.planned import PlannedSamples
from undula.data.script.indexed import IndexedData, ScriptData
from undula.plan.keys import multiset_digest
from undula.plan.plan import Plan
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state.events import ValidationEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store
from undula.testing import conformance
from undula.train import micro_batches
from undula.train.job import Job
from undula.train.micro_batches import DeviceBatches
from undula.train.run import Run
from undula.train.single_process import SingleProcess, local_world

Result = tuple[list[Any], ...]


def result_of(job: Job) -> Result:
    """Return losses, digests of samples and weights, and validation losses of a run."""
    ledger = read_ledger(Store(job.run_url))
    columns = [ledger.steps[name].to_pylist() for name in ("loss", "sample_digest", "weights_digest")]
    return *columns, [event.loss for event in events_of(ledger.events, ValidationEvent)]


def alone(folder: Path, num_workers: int = 0, **plan: Any) -> Job:
    job = drawn_job(folder, num_workers, **plan)
    SingleProcess(on_drawn, job, lambda message: None)()
    return job


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return result_of(alone(tmp_path_factory.mktemp("expected")))


def test_a_run_consumes_the_samples_of_the_plan(expected: Result, tmp_path: Path) -> None:
    plan = Plan(drawn_job(tmp_path).plan, ROWS)
    planned = PlannedSamples(IndexedData(ROWS, ""), plan)
    assert expected[1] == [multiset_digest(planned.step_ids(step)) for step in range(plan.total_steps)]
    assert expected[2][-1] is not None
    assert len(expected[3]) == 3  # before the first step, after 5 of 9, and after the last


def test_several_loader_processes_change_no_bit_and_end_with_the_run(expected: Result, tmp_path: Path) -> None:
    assert result_of(alone(tmp_path, num_workers=2)) == expected
    assert not multiprocessing.active_children()


def test_loader_processes_and_what_the_script_keeps_are_there_for_the_next_group_of_a_process(
    expected: Result, tmp_path: Path
) -> None:
    job, worker = drawn_job(tmp_path, num_workers=1), WorkerState(is_run=True, controller=object())

    seen, made = [], []
    for leaves_at in (2, 6, None):

        def ends(index: int, leaves_at: int | None = leaves_at) -> None:
            worker.request = Request(leaves=index == leaves_at)

        with local_world(torch.device("cpu")):
            worker.join_group()
            run = cpu_run(job, worker=worker)
            made.append(run.keep("mine", object))
            with suppress(LeaveGroup):
                on_drawn(run, ends)
            run.hand_over()
            run.free()
        seen.append({child.pid for child in multiprocessing.active_children()})
    assert made == [made[0]] * 3
    worker.close_kept()
    assert worker.keep("of the script: mine", object) is not made[0]
    assert len(seen[0]) == 2  # for training and for validation
    assert seen == [seen[0]] * 3
    assert result_of(job)[:3] == expected[:3]


class Staged(Drawn):
    """Dataset that the script changes before each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [0, 1, 2, 3]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.ones(1), "order": torch.tensor(self.order)}

    def set_epoch(self, epoch: int) -> None:
        self.order.sort(key=lambda value: (value - epoch) % 4)  # in place, so that no attribute has another value


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_a_script_changes_in_each_epoch_is_read_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    monkeypatch.setattr(micro_batches, "DeviceBatches", partial(DeviceBatches, reads_ahead=True))
    job = replace(
        drawn_job(tmp_path, num_workers, epochs=3), script_data=ScriptData(IndexedData(ROWS, ""), None, num_workers)
    )
    worker, firsts = WorkerState(is_run=True, controller=object()), set()

    def train(run: Run) -> None:
        data = Staged()
        run.dataset(data, num_workers=num_workers)
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps():
            data.set_epoch(step.epoch)
            for batch in step.batches():
                firsts.update((step.epoch, order[0]) for order in batch["order"].tolist())
                step.backward(model(batch["x"]).mean())
            step.update()
            worker.request = Request(leaves=step.index in (4, 12))

    for _ in range(3):
        with local_world(torch.device("cpu")), suppress(LeaveGroup):
            worker.join_group()
            run = cpu_run(job, worker=worker)
            train(run)
        run.hand_over()
        run.free()
    worker.close_kept()
    assert firsts == {(0, 0), (1, 1), (2, 2)}


def test_a_run_resumes_exactly_after_every_step(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("{name: drawn, plan: {global_batch: 12, micro_batch: 2}, config: {num_workers: 0}}")
    conformance.check(on_drawn, file, "plan.max_steps=3")


def test_calls_in_another_order_are_refused(tmp_path: Path) -> None:
    job = replace(drawn_job(tmp_path), script_data=ScriptData(IndexedData(ROWS, "")))

    def twice(run: Run) -> None:
        run.dataset(Drawn())
        run.dataset(Drawn())

    assert refusal(job, twice).startswith("run.dataset() was called twice; call it once")
    assert refusal(job, lambda run: run.model(nn.Linear(1, 1))).startswith(
        "run.model() was called before run.dataset()"
    )
    assert refusal(job, lambda run: run.map(lambda sample, rng: sample)).startswith(
        "run.map() transforms rows of Parquet"
    )
    stored = numbers_job(tmp_path)

    def after_model(run: Run) -> None:
        run.model(nn.Linear(1, 1))
        run.dataset(Drawn())

    assert refusal(stored, after_model).startswith("run.dataset() was called after run.model()")


@pytest.mark.parametrize(
    ("dataset", "arguments", "sentence"),
    [
        (
            Drawn(90),
            {},
            "run.dataset() got a dataset with 90 samples instead of 103, which the driver got; give all nodes",
        ),
        (DrawnAtOnce(), {}, "run.dataset() got a dataset with the fingerprint or name '5c4f2a' instead of ''"),
        (Drawn(), {"validation": Drawn(9)}, "run.dataset() got a validation dataset either here or in the driver"),
        (Drawn(), {"shuffle": True}, "run.dataset() does not take shuffle=; set plan.shuffle"),
    ],
)
def test_a_worker_refuses_other_data_than_the_drivers(
    tmp_path: Path, dataset: Any, arguments: dict[str, Any], sentence: str
) -> None:
    job = replace(drawn_job(tmp_path), script_data=ScriptData(IndexedData(ROWS, "")))
    assert refusal(job, lambda run: run.dataset(dataset, **arguments)).startswith(sentence)


def test_a_dataset_beside_stored_data_is_refused(tmp_path: Path) -> None:
    job = numbers_job(tmp_path)
    assert refusal(job, lambda run: run.dataset(Drawn())).startswith(
        "run.dataset() was called, but the job has data.train"
    )


@pytest.mark.parametrize("last_step", ["drop", "wrap"])
def test_all_kinds_of_a_last_step_are_trained(tmp_path: Path, last_step: str) -> None:
    job = alone(tmp_path, global_batch=24, last_step=last_step, epochs=2)
    planned = PlannedSamples(IndexedData(ROWS, ""), plan := Plan(job.plan, ROWS))
    assert result_of(job)[1] == [multiset_digest(planned.step_ids(step)) for step in range(plan.total_steps)]


def _train(rank: int, world_size: int, job: Job) -> None:
    run = cpu_run(job, rank, world_size)
    on_drawn(run)
    run.free()


def test_an_elastic_batch_takes_the_samples_of_several_steps(tmp_path: Path) -> None:
    job = drawn_job(tmp_path, num_workers=1, batch="elastic")
    on_ranks(2, _train, job)
    planned = PlannedSamples(IndexedData(ROWS, ""), Plan(job.plan, ROWS))
    steps = read_ledger(Store(job.run_url)).steps
    for step, count, digest in zip(
        *(steps[name].to_pylist() for name in ("step", "merged_steps", "sample_digest")), strict=True
    ):
        assert digest == multiset_digest(np.concatenate([planned.step_ids(each) for each in range(step, step + count)]))
    assert steps["merged_steps"].to_pylist() == [2, 2, 2, 2, 1]


@pytest.mark.parametrize(("num_workers", "rows"), [(0, 120), (0, 90), (1, 120)])
def test_a_dataset_that_changes_its_length_is_refused(tmp_path: Path, num_workers: int, rows: int) -> None:
    job = drawn_job(tmp_path, num_workers, epochs=2)
    job = replace(job, script_data=ScriptData(IndexedData(ROWS, ""), None, num_workers))

    def train(run: Run) -> None:
        data = Drawn()
        run.dataset(data, num_workers=num_workers)
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps():
            data._rows = ROWS if step.epoch == 0 else rows
            for batch in step.batches():
                step.backward(model(batch["x"]).mean())
            step.update()

    assert refusal(job, train).startswith(f"the dataset has {rows} samples now, but had {ROWS} when the run began")


class Prepared(Drawn):
    """Dataset whose fingerprint is another one in every process, as after a map with a function that closes over its arguments."""

    @property
    def _fingerprint(self) -> str:
        return token_hex(4)


def test_a_name_in_the_yaml_takes_the_place_of_a_fingerprint_that_differs(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        run.dataset(Prepared(), validation=Prepared())
        run.model(nn.Linear(1, 1))

    known = ScriptData(IndexedData(ROWS, "first"), IndexedData(ROWS, "first"))
    job = replace(drawn_job(tmp_path), script_data=known)
    assert "in every process, set data.name in the job's YAML" in refusal(job, train)
    named = replace(job, data=replace(job.data, name="first"))
    with local_world(torch.device("cpu")):
        cpu_run(named).dataset(Prepared(), validation=Prepared())
    other = replace(job, data=replace(job.data, name="second"))
    assert "the fingerprint or name 'second' instead of 'first'" in refusal(other, train)
