"""Tests of bugs in the user's script: the job ends at once and shows the user's own line."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from jobs_kit import Jobs
from night import at_night

from undula.state.events import CrashEvent, FailEvent, StartEvent, WarningEvent
from undula.state.ledger import events_of

SCRIPT = """
import torch
from torch import nn
import undula

def train(run):
    model = run.model(nn.Linear(4, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(batch["text"][:, :4].float()).mean() * 1e-6)
        step.update()
        if step.index == 3:
            batch["lable"]

if __name__ == "__main__":
    undula.main(train)
"""


def test_a_bug_ends_the_job_at_once_with_its_traceback(session_jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "buggy.py"
    script.write_text(SCRIPT)
    script.with_suffix(".yaml").write_text(
        "name: buggy\ndata: {train: x}\nplan: {virtual_workers: 2, global_batch: 8}\n"
    )
    jobs = replace(session_jobs, script=script, runs=str(tmp_path), settings=())
    done = jobs.run("buggy", *jobs.workers(2))
    assert done.status == 1
    line = SCRIPT.splitlines().index('            batch["lable"]') + 1
    assert f'buggy.py", line {line}, in train' in done.err
    assert done.err.rstrip().endswith("KeyError: 'lable'")
    assert len(events_of(done.ledger.events, StartEvent)) == 1
    assert events_of(done.ledger.events, CrashEvent) == [], (
        "no other group follows, in which a worker could be replaced"
    )
    (failure,) = events_of(done.ledger.events, FailEvent)
    assert f"KeyError: 'lable' at buggy.py:{line}" in failure.error
    assert "no_validation" in [warning.code for warning in events_of(done.ledger.events, WarningEvent)]
    assert re.search(r"failed after \d of \d+ steps", done.out)


LOST_IMPORT = """
import ray
import undula

if ray.is_initialized():  # in a worker, but not yet in the driver
    import a_module_that_no_worker_has

def train(run):
    pass

if __name__ == "__main__":
    undula.main(train)
"""


def test_an_import_error_in_the_workers_ends_the_job_with_the_reason(session_jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "lost.py"
    script.write_text(LOST_IMPORT)
    script.with_suffix(".yaml").write_text(
        "name: lost\ndata: {train: x}\nplan: {virtual_workers: 2, global_batch: 8}\n"
    )
    done = replace(session_jobs, script=script, runs=str(tmp_path), settings=()).run("lost", *session_jobs.workers(1))
    assert done.status == 1
    assert "a_module_that_no_worker_has" in done.err


UNMATCHED = """
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
import undula

def train(run):
    marker = Path(__file__).with_name("has-waited")
    model = run.model(nn.Linear(4, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(batch["text"][:, :4].float()).mean() * 1e-6)
        if step.index == 3 and run.rank == 0 and not marker.exists():
            marker.touch()
            dist.barrier()
        step.update()

if __name__ == "__main__":
    undula.main(train)
"""


def test_ranks_in_a_deadlock_are_interrupted_and_the_run_continues(session_jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "unmatched.py"
    script.write_text(UNMATCHED)
    script.with_suffix(".yaml").write_text(
        "name: unmatched\ndata: {train: x}\nplan: {virtual_workers: 2, global_batch: 8, max_steps: 8}\n"
    )
    jobs = replace(session_jobs, script=script, runs=str(tmp_path), settings=())
    done = jobs.run("unmatched", *jobs.workers(2), "workers.hang_limit_s=2")
    assert done.status == 0, done.err
    deadlocks = [crash for crash in events_of(done.ledger.events, CrashEvent) if crash.cause == "deadlock"]
    assert [deadlock.limit_s for deadlock in deadlocks] == [2.0]
    starts = [(start.origin, start.step, start.world_size) for start in events_of(done.ledger.events, StartEvent)]
    assert ("the memory of a worker", 3, 2) in starts
    assert done.column("step") == list(range(8))
    assert done.ledger.replaced.num_rows == 0


ALONE = """
import torch
import torch.distributed as dist
from torch import nn
import undula

def train(run):
    model = run.model(nn.Linear(4, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(batch["text"][:, :4].float()).mean() * 1e-6)
        step.update()
        if run.rank == 0 and step.index == 3 and run.config["place"] == "loop":
            dist.barrier()  # in the loop
    if run.rank == 0 and run.config["place"] == "end":
        dist.barrier()  # at the end

if __name__ == "__main__":
    undula.main(train)
"""
OTHERS_IN = {"loop": "rank 1 in update() at alone.py:{}", "end": "rank 1 at the end of the script"}


@pytest.mark.parametrize("place", ["loop", *at_night(["end"])])
def test_a_collective_of_one_rank_alone_ends_the_job_with_the_calls_and_lines(
    session_jobs: Jobs, tmp_path: Path, place: str
) -> None:
    """Without a limit of its own, a group that hangs in a step would be ended only later, and the next one would hang again."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    script.with_suffix(".yaml").write_text(
        f"name: alone\ndata: {{train: x}}\nplan: {{virtual_workers: 2, global_batch: 8, max_steps: 8}}\nconfig: {{place: {place}}}\n"
    )
    jobs = replace(session_jobs, script=script, runs=str(tmp_path), settings=())
    done = jobs.run("alone", *jobs.workers(2), "workers.hang_limit_s=300")
    assert done.status == 2, done.err
    lines = ALONE.splitlines()
    alone, update = (
        next(number for number, code in enumerate(lines, 1) if text in code)
        for text in (f"{'in' if place == 'loop' else 'at'} the {place}", "step.update()")
    )
    waits = f"rank 0 in barrier() at alone.py:{alone}, {OTHERS_IN[place].format(update)}"
    assert f"the workers wait for each other in different collectives: {waits}; all workers must" in done.err
    assert len(events_of(done.ledger.events, StartEvent)) == 1


@pytest.mark.parametrize("how", ["return", *at_night(["sys.exit(0)", "sys.exit('done')", "raise KeyboardInterrupt"])])
def test_a_rank_that_ends_alone_ends_the_job_with_the_reason(session_jobs: Jobs, tmp_path: Path, how: str) -> None:
    """The others would wait for it without end."""
    script = tmp_path / "leaves.py"
    bug = 'if step.index == 3:\n            batch["lable"]'
    assert bug in SCRIPT
    script.write_text("import sys\n" + SCRIPT.replace(bug, f"if step.index == 3 and run.rank == 1:\n            {how}"))
    script.with_suffix(".yaml").write_text(
        "name: leaves\ndata: {train: x}\nplan: {virtual_workers: 2, global_batch: 8, max_steps: 8}\n"
    )
    jobs = replace(session_jobs, script=script, runs=str(tmp_path), settings=())
    done = jobs.run("leaves", *jobs.workers(2))
    assert done.status == 2
    ended = "the script ended after 4 of 8 steps on rank 1"
    reasons = {
        "sys.exit('done')": "rank 1 with sys.exit('done')",
        "raise KeyboardInterrupt": "rank 1 with KeyboardInterrupt",
    }
    reason = reasons.get(how, ended)
    assert reason in done.err
