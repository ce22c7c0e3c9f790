"""Tests of scripts that set a default device of torch: what the library makes in host memory stays there.

The device is 'meta' in place of a GPU: a tensor that the library makes on it has no values, so that its use fails.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_job import cpu_run, network, numbers_job
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

import undula
from undula.data.script.indexed import IndexedData, ScriptData
from undula.data.spec import ValidationSpec
from undula.parallel.spec import ActivationsSpec, GradientSpec
from undula.plan.precision import PrecisionSpec
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state.ledger import read_ledger
from undula.storage import open_store
from undula.train.device_batches import pinned
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import local_world

CPU = torch.device("cpu")
Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


class Labelled(Dataset[Any]):
    """Dataset whose labels are numbers, of which torch's collate function makes a tensor, and which draws random numbers."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index + torch.rand(()), "label": index % 2}


class Averaged(nn.Module):
    """Layer with statistics in buffers, one of which is made in the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(1), nn.Linear(1, 1)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean(0)
        return self.layer(self.norm(x))  # type: ignore[no-any-return]


class Embedded(nn.Module):
    """Sum of embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(48, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table((x[:, 0] * 47).long()))  # type: ignore[no-any-return]


def train(run: Run, make: Make, device: str | None, after: Callable[[int], None] = lambda index: None) -> None:
    """Train a model that the script puts on the CPU, with another default device."""
    torch.set_default_device(device)
    if run._session.job.script_data is not None:
        run.dataset(Labelled(), validation=Labelled(), num_workers=run.config["num_workers"])
    with CPU:
        module = make()
    model = run.model(module)
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    values: list[float] = []
    run.state("values", lambda: values[-1:], lambda found, repeats: values.extend(found))

    def loss(batch: dict[str, Any]) -> Tensor:
        return (model(batch["x"][:, None] / 48) - 1).square().mean()

    for step in run.steps(validate=loss):
        step.total(len(step.load()))
        for batch in step.batches():
            step.backward(loss(batch))
            step.log(rows=len(batch["x"]))
        step.reduce()
        after(step.index)
        step.update()
        values.append(step.loss or 0.0)
        run.gather(step.loss)


def losses_of(job: Job) -> list[float]:
    found = read_ledger(open_store(job.run_url)).steps
    return [value for name in ("loss", "grad_norm") for value in found[name].to_pylist()]


def interrupted(job: Job, make: Make) -> None:
    """Train in groups that end after a step each, and continue from a checkpoint, or from what the process has held."""
    worker = WorkerState(is_run=True, controller=object())
    for last in (0, 2, 3, None):
        with local_world(CPU):
            worker.join_group()
            run = cpu_run(job, worker=worker)

            def leave(index: int, worker: WorkerState = worker, last: int | None = last) -> None:
                worker.request = Request(leaves=index == last, saves=last == 2)

            with suppress(LeaveGroup):
                train(run, make, "meta", leave)
            run.hand_over()
            run.free()
        worker.held = None if last == 2 else worker.held


JOBS: dict[str, tuple[Make, dict[str, Any]]] = {
    "plain": (network, {}),
    "deterministic": (Averaged, {"deterministic": True}),
    "buffers": (Averaged, {}),
    "noise scale": (network, {"gradient": GradientSpec(noise_every_steps=1)}),
    "clipped": (network, {"gradient": GradientSpec(max_norm=0.1)}),
    "adasum": (network, {"gradient": GradientSpec(reduce="adasum")}),
    "sparse": (Embedded, {}),
    "bf16": (network, {"precision": PrecisionSpec("bf16")}),
    "recomputed": (network, {"activations": ActivationsSpec(keep="none", units=("0", "2"))}),
    "offloaded": (network, {"activations": ActivationsSpec(keep="all", offload=True, units=("0", "2"))}),
}


def job_of(folder: Path, settings: dict[str, Any]) -> Job:
    job = numbers_job(folder)
    data = replace(job.data, validation=job.data.train)
    return replace(job, data=data, validation=ValidationSpec(every_steps=2), **settings)


def trained(job: Job, make: Make) -> tuple[Job, Job]:
    """Return the job after a run without another default device, and a job with the same settings."""
    with local_world(CPU):
        run = cpu_run(job)
        train(run, make, None)
        run.free()
    return job, replace(job, run_url=f"{job.run_url}-other", run_id=f"{job.run_id}-other")


@pytest.mark.parametrize("name", JOBS)
def test_another_default_device_changes_no_step_and_no_resume(tmp_path: Path, name: str) -> None:
    make, settings = JOBS[name]
    job, other = trained(job_of(tmp_path, settings), make)
    interrupted(other, make)
    assert losses_of(other) == losses_of(job)


def _train_on(rank: int, world_size: int, job: Job, make: Make) -> None:
    run = cpu_run(job, rank, world_size)
    train(run, make, "meta")
    run.free()


@pytest.mark.parametrize("name", ["plain", "sparse", "deterministic"])
def test_ranks_with_another_default_device_reduce_their_steps(tmp_path: Path, name: str) -> None:
    make, settings = JOBS[name]
    job, other = trained(job_of(tmp_path, settings), make)
    on_ranks(2, _train_on, other, make)
    assert losses_of(other) == pytest.approx(losses_of(job), rel=1e-4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_a_dataset_are_made_on_the_host_with_its_seeded_generator(tmp_path: Path, num_workers: int) -> None:
    data = ScriptData(IndexedData(48, ""), IndexedData(48, ""), num_workers)
    job = replace(numbers_job(tmp_path), script_data=data, config={"num_workers": num_workers})
    with local_world(CPU):
        for device, name in ((None, "run"), ("meta", "other")):
            run = cpu_run(replace(job, run_url=f"{tmp_path}/{name}"))
            train(run, network, device)
            run.free()
    assert losses_of(replace(job, run_url=f"{tmp_path}/other")) == losses_of(job)


def test_a_batch_that_is_on_a_device_already_is_not_pinned() -> None:
    batch = torch.empty(3, device="meta")
    assert pinned(batch) is batch


FACTORIES = {
    *("empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "asarray", "scalar_tensor", "arange"),
    *("rand", "randn", "randint", "randperm", "eye", "linspace", "sparse_coo_tensor"),
}
"""Functions of torch that make a tensor on the default device unless they are told another one."""


def test_the_library_names_the_device_of_each_tensor_that_it_makes() -> None:
    """The checks of studies are left out: they are no part of a run."""
    package = Path(undula.__file__).parent
    # The arguments may have parentheses in parentheses.
    call = re.compile(rf"\btorch\.({'|'.join(FACTORIES)})(\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))")
    missing = [
        f"{file.relative_to(package)}: {found.group()}"
        for file in package.rglob("*.py")
        if file.relative_to(package).parts[0] != "study"
        for found in call.finditer(file.read_text())
        if "device=" not in found.group()
    ]
    assert missing == []
