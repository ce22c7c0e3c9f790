"""Tests of the phases that a rank reports: a rank that waits, or that does what takes long only once, is not taken for one that hangs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_job import begin, cpu_run, numbers_job, run_batches
from torch import Tensor, nn

from undula.data.spec import ValidationSpec
from undula.elastic.pure.policy import lost_ranks
from undula.parallel.capabilities import DATA_PARALLEL
from undula.parallel.engines.engine import Engine
from undula.recovery.progress import REDUCE, START_LIMIT_S, ProgressView
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.recovery.worker_state import WorkerState
from undula.state.spec import CheckpointSpec
from undula.train import validation
from undula.train.job import Job
from undula.train.run import Run
from undula.train.step import Step

pytestmark = pytest.mark.usefixtures("process_group")
LIMIT_S = 5.0


class ShardedEngine(Engine):
    """Engine whose forward and backward passes count as ones with collectives."""

    capabilities = replace(DATA_PARALLEL, name="sharded", equal_rounds=True)


def counts_as_hung(view: ProgressView, seconds: float = 60.0, *others: ProgressView) -> bool:
    """Return whether a rank is lost that has been in its phase for so long, after its first step and with these other ranks."""
    ranks = [replace(view, phase_s=seconds, longest_step_s=0.4), *others]
    return 0 in lost_ranks(ranks, [0.0] * len(ranks), LIMIT_S)


def trained(run: Run, seen: Callable[[Step, str], None]) -> Iterator[Step]:
    """Train, call `seen` in the forward pass and during the backward pass of each micro-batch, and yield each step after its update."""
    model = begin(run)
    for step in run.steps():
        for batch in step.batches():
            seen(step, "forward")
            loss = model(batch["x"][:, None] / 48).square().mean()
            loss.register_hook(lambda gradient, step=step: seen(step, "backward"))
            step.backward(loss)
        step.update()
        yield step


def views_of(job: Job, **more: Any) -> dict[tuple[int, str], list[ProgressView]]:
    """Train a job, and return the progress that its rank reports in each step, by step and by part of the step."""
    worker, found = WorkerState(), {}

    def seen(step: Step, part: str) -> None:
        found.setdefault((step.index, part), []).append(worker.progress.view())

    for step in trained(cpu_run(job, worker=worker, **more), seen):
        found.setdefault((step.index, "after"), []).append(worker.progress.view())
    return found


def test_a_rank_that_computes_with_batches_of_a_new_shape_may_take_long(tmp_path: Path) -> None:
    """Steps 2 and 5 have 8 samples and the others 20, so that a compiled model is compiled again in step 2."""
    found = views_of(numbers_job(tmp_path, global_batch=20, epochs=2))
    hung = {key: all(counts_as_hung(view) for view in views) for key, views in found.items()}
    assert hung == {
        **{(step, part): step not in (0, 2) for step in range(6) for part in ("forward", "backward")},
        **{(step, "after"): False for step in range(6)},
    }
    assert all(counts_as_hung(view, START_LIMIT_S + 1) for views in found.values() for view in views)


def test_an_optimizer_that_takes_long_now_and_then_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    worker, found = WorkerState(), []

    class Refreshing(torch.optim.SGD):
        """Optimizer that would compute for long in some of its steps, as Shampoo and K-FAC do."""

        def step(self, closure: Any = None) -> Any:
            found.append(worker.progress.view())
            return super().step(closure)

    run = cpu_run(numbers_job(tmp_path), worker=worker)
    model = run.model(nn.Linear(1, 1))
    run.optimizer(Refreshing(model.parameters(), lr=run.base_lr))
    waiting: list[ProgressView] = []
    for step in run.steps():
        run_batches(step, model)
        step.reduce()
        waiting.append(worker.progress.view())
        step.update()
    view, peer = found[-1], replace(waiting[-1], phase_s=60.0, longest_step_s=0.4)
    assert not counts_as_hung(view, START_LIMIT_S - 1, peer)
    assert lost_ranks([replace(view, phase_s=60.0, longest_step_s=0.4), peer], [0.0, 0.0], LIMIT_S) == []
    stuck = replace(view, phase_s=START_LIMIT_S + 1, longest_step_s=0.4)
    assert lost_ranks([stuck, replace(peer, phase_s=START_LIMIT_S + 1)], [0.0, 0.0], LIMIT_S) == [0]


def test_a_rank_in_its_last_backward_pass_does_its_own_work(tmp_path: Path) -> None:
    """Otherwise all ranks would count as waiting for each other if one of them hangs there."""
    found = views_of(numbers_job(tmp_path))
    (*_, backward) = found[2, "backward"]
    own = replace(backward, phase_s=60.0, longest_step_s=0.4)
    assert lost_ranks([own, replace(own, phase=REDUCE)], [0.0, 0.0], LIMIT_S) == [0]


def test_a_rank_of_a_sharded_model_may_be_waiting_in_its_forward_pass(tmp_path: Path) -> None:
    waits_for_data = next(view for view in views_of(numbers_job(tmp_path / "a"))[1, "forward"])
    found = views_of(numbers_job(tmp_path / "b"), engine=lambda module, layout: ShardedEngine(layout))
    others = replace(waits_for_data, phase_s=1.0, longest_step_s=0.4)
    assert not any(counts_as_hung(view, 60.0, others) for view in found[1, "forward"])
    assert all(counts_as_hung(view) for view in found[1, "forward"])


def test_a_rank_that_waits_for_its_snapshot_may_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(numbers_job(tmp_path), checkpoint=CheckpointSpec(every_steps=100, snapshot_every_steps=1))
    worker, found = WorkerState(), []
    wait = SnapshotWriter.wait

    def watched(writer: SnapshotWriter) -> None:
        if writer._taking:
            found.append(worker.progress.view())
        wait(writer)

    monkeypatch.setattr(SnapshotWriter, "wait", watched)
    for _ in trained(cpu_run(job, worker=worker), lambda step, part: None):
        pass
    assert len(found) >= 3
    assert not any(counts_as_hung(view) for view in found)
    assert all(counts_as_hung(view, START_LIMIT_S + 1) for view in found)


def test_a_rank_that_has_validated_waits_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = numbers_job(tmp_path, max_steps=1)
    job = replace(job, data=replace(job.data, validation=job.data.train), validation=ValidationSpec(every_steps=1))
    worker = WorkerState()
    computes: list[ProgressView] = []
    waits: list[ProgressView] = []
    mean = validation.exact_means

    def watched(*arguments: Any) -> Any:
        waits.append(worker.progress.view())
        return mean(*arguments)

    monkeypatch.setattr(validation, "exact_means", watched)
    run = cpu_run(job, worker=worker)
    model = begin(run)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        if not torch.is_grad_enabled():
            computes.append(worker.progress.view())
        return model(batch["x"][:, None]).mean()

    for step in run.steps(validate=loss):
        for batch in step.batches():
            step.backward(loss(batch))
        step.update()
    assert len(waits) == 2
    assert not counts_as_hung(waits[-1], START_LIMIT_S + 1, replace(computes[-1], phase_s=0.2))
    assert not counts_as_hung(computes[-1], START_LIMIT_S - 1, waits[-1])
    assert counts_as_hung(computes[-1], START_LIMIT_S + 1, waits[-1])
