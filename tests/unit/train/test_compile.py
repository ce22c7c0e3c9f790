"""Tests of compiled models: one graph for each size of micro-batch, the same bits everywhere, and compilation that no limit counts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from numbers_job import cpu_run, numbers_job
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from undula.elastic.pure.policy import lost_ranks
from undula.elastic.worker import prepare_worker
from undula.errors import ClusterError, UsageError
from undula.parallel.activations import keep_activations
from undula.parallel.compile import compile_forward, watch_compilation
from undula.parallel.spec import ActivationsSpec
from undula.recovery.progress import COMPILE_S, COMPILING, START_LIMIT_S, ProgressView
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state.ledger import read_ledger
from undula.storage import open_store
from undula.train.dry_run.rehearsal import rehearse
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import local_world

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(which("g++") is None, reason="g++ is not installed")


class Small(nn.Module):
    """One layer, a nonlinearity and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.layer(x)), 0.1, self.training)


def train(run: Run, after: Callable[[int], None] = lambda done: None) -> None:
    """Train and validate a small model."""
    model = run.model(Small())
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))

    def loss(batch: dict[str, Any]) -> Tensor:
        return model(batch["x"][:, None] / 48).square().mean()

    for step in run.steps(validate=loss):
        for batch in step.batches():
            step.backward(loss(batch))
        after(step.index)
        step.update()


def small_job(folder: Path) -> Job:
    """Return a job with steps of 20 samples and a short one of 8, for four virtual workers."""
    job = numbers_job(folder, global_batch=20, epochs=2)
    return replace(job, deterministic=True, compile=True, data=replace(job.data, validation=job.data.train))


@contextmanager
def counted() -> Iterator[list[str]]:
    """Count compilations."""
    found: list[str] = []
    stop = watch_compilation(lambda: found.append("begin"), lambda: None)
    yield found
    stop()


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Undo what a deterministic run sets in this process."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.set_num_threads(before[1])


def digests_of(job: Job) -> list[int]:
    return read_ledger(open_store(job.run_url)).steps["weights_digest"].to_pylist()


@needs_compiler
def test_a_rehearsal_compiles_all_that_a_run_needs_and_the_run_is_the_same_after_it_leaves_and_resumes(
    tmp_path: Path,
) -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    job = small_job(tmp_path / "whole")
    with counted() as found:
        rehearse(train, job, CPU, lambda message: None)
    assert found, "nothing was compiled"
    with counted() as found:
        with local_world(CPU):
            run = cpu_run(job)
            train(run)
            run.free()
        interrupted = replace(small_job(tmp_path / "interrupted"), run_id=job.run_id)
        for last in (1, 3, 5):
            worker = WorkerState(is_run=True)

            def leave(index: int, worker: WorkerState = worker, last: int = last) -> None:
                worker.request = Request(leaves=index == last, saves=True)

            with local_world(CPU):
                run = cpu_run(interrupted, worker=worker)
                with suppress(LeaveGroup):
                    train(run, leave)
                run.free()
    assert found == [], "the run compiled something that the rehearsal had not"
    assert digests_of(interrupted) == digests_of(job)
    assert digests_of(job)[-1] is not None


@needs_compiler
def test_no_limit_counts_compilation_in_forward_and_backward_passes(tmp_path: Path) -> None:
    torch._dynamo.reset()
    worker, views, stop = WorkerState(), list[ProgressView](), None
    with local_world(CPU):
        run = cpu_run(small_job(tmp_path), worker=worker)
        model = run.model(Small())
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
        for step in run.steps():
            stop = stop or watch_compilation(lambda: views.append(worker.progress.view()), lambda: None)
            for batch in step.batches():
                step.backward(model(batch["x"][:, None] / 48).square().mean())
                assert worker.progress.view().phase != COMPILING
            step.update()
        run.free()
    assert stop is not None
    stop()
    assert (
        len(views) >= 2
    )  # a full and a short step, and their backward passes if the node has not compiled them before
    for view in views:
        for seconds, is_lost in ((START_LIMIT_S + 60, False), (START_LIMIT_S + COMPILE_S + 60, True)):
            ranks = [replace(view, phase_s=seconds, longest_step_s=0.4)]
            assert lost_ranks(ranks, [0.0], 5.0) == ([0] if is_lost else []), view


def gradients(spec: ActivationsSpec, compiles: bool, sharded: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)))
    if sharded:
        for block in module:
            fully_shard(block)
        fully_shard(module)
    undo = [compile_forward(module, spec, 1)] if compiles else []
    undo.append(keep_activations(module, spec))
    torch.manual_seed(2)
    module(torch.ones(3, 4, requires_grad=True)).square().mean().backward()
    for each in reversed(undo):
        each()
    assert not any("forward" in part.__dict__ for part in module.modules())
    found = [each.grad for each in module.parameters() if each.grad is not None]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


@needs_compiler
@pytest.mark.usefixtures("process_group")
def test_compiled_units_have_the_same_bits_whatever_is_kept_and_in_a_sharded_model() -> None:
    expected = gradients(ActivationsSpec("none"), compiles=True)
    sharded = gradients(ActivationsSpec(), compiles=True, sharded=True)
    assert all(map(torch.equal, sharded, expected))
    for spec in (
        ActivationsSpec("sqrt"),
        ActivationsSpec("every_3", offload=True),
        ActivationsSpec("all", offload=True),
    ):
        assert all(map(torch.equal, gradients(spec, compiles=True), expected)), spec


@needs_compiler
def test_a_model_that_changes_a_number_in_each_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    monkeypatch.setattr("undula.parallel.compile.OTHER_GRAPHS", 0)
    module = Counting()
    with torch._dynamo.config.patch(recompile_limit=1):
        undo = compile_forward(module, ActivationsSpec(), graphs=1)
        module(torch.ones(2))
        with pytest.raises(UsageError, match="torch has compiled a part of the model too often"):
            module(torch.ones(2))
        undo()


def test_a_node_without_a_compiler_is_named_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    monkeypatch.setattr("undula.elastic.worker.reserved_device", lambda: CPU)
    with pytest.raises(
        ClusterError, match=r"^compile=true needs a working C\+\+ compiler, and torch cannot use one here \(.*no-such"
    ):
        prepare_worker(small_job(tmp_path), lambda message: None)
