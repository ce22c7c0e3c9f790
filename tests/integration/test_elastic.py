"""Tests with nodes that come and go: no step is lost or repeated, and the losses equal those of an undisturbed run."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from jobs_kit import Jobs, relative_difference

from undula.report.data.certificate import certify, data_of
from undula.report.data.run_record import read_run
from undula.state.commit import find_commits
from undula.state.events import BatchEvent, CheckpointEvent, Event, ResizeEvent, SaveEvent, StartEvent, WaitingEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store, open_store
from undula.testing.nodes import nodes

E = TypeVar("E", bound=Event)
SETTINGS = (
    *("checkpoint.every_steps=1000", "data.validation=null", "workers.grow=always", "schedule.decay=constant"),
    *("schedule.base_lr=3e-4", "config.model.width=128", "config.model.layers=4"),
)


@dataclass(frozen=True)
class Recorded:
    """Steps and events that a running job has recorded so far."""

    store: Store

    def rows(self) -> list[dict[str, Any]]:
        return read_ledger(self.store).steps.to_pylist() if self.store.exists("ledger") else []

    def sizes(self) -> list[int]:
        return [row["world_size"] for row in self.rows()]

    def of(self, event_type: type[E]) -> list[E]:
        return events_of(read_ledger(self.store).events, event_type) if self.store.exists("ledger") else []

    def waits_for_one_worker(self) -> bool:
        return any(wait.needed - wait.ready == 1 for wait in self.of(WaitingEvent))


def wait_for(process: "subprocess.Popen[str]", condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)  # limits the polling rate


def test_growth_and_a_notice_to_rank_0_lose_no_step_and_change_no_loss(session_jobs: Jobs, tmp_path: Path) -> None:
    with nodes() as cluster:
        first = cluster.add()
        cluster.await_all()
        jobs = Jobs(cluster.cluster, session_jobs.text, str(tmp_path))
        process = jobs.start("moved", *SETTINGS, "plan.max_steps=3000", "workers.min=1", "workers.max=2")
        recorded = Recorded(open_store(f"{tmp_path}/moved"))
        wait_for(process, lambda: len(recorded.of(StartEvent)) > 0)
        second = cluster.add()
        wait_for(process, lambda: 2 in recorded.sizes())
        cluster.drain(first, deadline_s=60)
        wait_for(process, lambda: recorded.sizes()[-1] == 1)
        assert set(cluster.nodes) == {first, second}  # the group has left the node before the node ends
        process.terminate()
        process.communicate()
    ledger = read_ledger(recorded.store)
    assert [(resize.before, resize.after) for resize in recorded.of(ResizeEvent)[:2]] == [(1, 2), (2, 1)]
    moved = ledger.steps
    assert moved["step"].to_pylist() == list(range(moved.num_rows))
    assert ledger.replaced.num_rows == 0

    # With a constant rate, a shorter run equals the beginning of a longer one.
    alone = session_jobs.run("not-moved", *SETTINGS, f"plan.max_steps={moved.num_rows}", *session_jobs.workers(1))
    assert alone.status == 0, alone.err
    assert alone.column("sample_digest") == moved["sample_digest"].to_pylist()
    assert relative_difference(moved["loss"].to_pylist(), alone.column("loss")) < 1e-4


def test_a_run_that_falls_below_min_workers_saves_trains_until_shortly_before_the_deadline_and_waits(
    session_jobs: Jobs, tmp_path: Path
) -> None:
    with nodes() as cluster:
        cluster.add()
        doomed = cluster.add()
        cluster.await_all()
        jobs = Jobs(cluster.cluster, session_jobs.text, str(tmp_path))
        process = jobs.start("waits", *SETTINGS, "plan.max_steps=3000", "workers.min=2", "workers.max=2")
        recorded = Recorded(open_store(f"{tmp_path}/waits"))
        wait_for(process, lambda: len(recorded.of(StartEvent)) > 0)
        deadline = time.time() + 14
        cluster.drain(doomed, deadline_s=14)
        wait_for(process, lambda: len(recorded.of(CheckpointEvent)) > 0)
        first = find_commits(recorded.store)[0][0].step
        wait_for(process, lambda: recorded.waits_for_one_worker())
        last = find_commits(recorded.store)[0][0].step
        assert last > first + 5
        saved = [event.time for event in recorded.of(CheckpointEvent)]
        assert deadline - 7 < saved[-1] < deadline
        cluster.kill(doomed)
        cluster.add()
        wait_for(process, lambda: (last, 2) in [(start.step, start.world_size) for start in recorded.of(StartEvent)])
        process.terminate()
        process.communicate()
    assert [save.lead_s for save in recorded.of(SaveEvent)] == [5.0, None]
    assert read_ledger(recorded.store).replaced.num_rows == 0


@pytest.mark.soak
def test_a_run_whose_only_node_is_lost_resumes_from_the_copy_on_the_head(session_jobs: Jobs, tmp_path: Path) -> None:
    with nodes() as cluster:
        only = cluster.add()
        cluster.await_all()
        jobs = Jobs(cluster.cluster, session_jobs.text, str(tmp_path))
        process = jobs.start("copied", *SETTINGS, "plan.max_steps=30000", *jobs.workers(1))
        recorded = Recorded(open_store(f"{tmp_path}/copied"))
        wait_for(process, lambda: len(recorded.rows()) > 50)
        cluster.kill(only)
        reached = len(recorded.rows())
        cluster.add()
        wait_for(process, lambda: len(recorded.of(StartEvent)) > 1)
        wait_for(process, lambda: len(recorded.rows()) > reached + 50)
        process.terminate()
        process.communicate()
    assert recorded.of(StartEvent)[1].origin == "the memory of the head"
    run = read_run(recorded.store)
    certificate = certify(run, data_of(run))
    assert certificate.holds, certificate.difference


@pytest.mark.soak
def test_a_held_state_survives_the_loss_of_its_node(session_jobs: Jobs, tmp_path: Path) -> None:
    with nodes() as cluster:
        last, lost = cluster.add(), cluster.add()
        cluster.await_all()
        jobs = Jobs(cluster.cluster, session_jobs.text, str(tmp_path))
        process = jobs.start("rescued", *SETTINGS, "plan.max_steps=30000", *jobs.workers(2))
        recorded = Recorded(open_store(f"{tmp_path}/rescued"))
        wait_for(process, lambda: len(recorded.rows()) > 50)
        cluster.kill(lost)
        wait_for(process, lambda: recorded.waits_for_one_worker())
        actors = cluster.count()["actors"]
        cluster.drain(last, deadline_s=30)
        wait_for(
            process, lambda: cluster.count()["actors"] < actors
        )  # the worker has handed over its state and is released
        cluster.kill(last)
        for _ in range(2):
            cluster.add()
        wait_for(process, lambda: len(recorded.of(StartEvent)) > 1)
        process.terminate()
        process.communicate()
    assert recorded.of(StartEvent)[1].origin == "the memory of the head"
    ledger = read_ledger(recorded.store)
    assert ledger.steps["step"].to_pylist() == list(range(ledger.steps.num_rows))
    assert ledger.replaced.num_rows == 0


def test_an_elastic_batch_follows_the_workers_and_the_rate_follows_the_batch(
    session_jobs: Jobs, tmp_path: Path
) -> None:
    batch = (
        "plan.batch=elastic",
        "schedule.batch_rule=linear",
        "schedule.rewarm_samples=240",
        "schedule.warmup_samples=0",
    )
    with nodes() as cluster:
        first = cluster.add()
        cluster.await_all()
        jobs = Jobs(cluster.cluster, session_jobs.text, str(tmp_path))
        process = jobs.start("follows", *SETTINGS, *batch, "plan.max_steps=30000", "workers.min=1", "workers.max=2")
        recorded = Recorded(open_store(f"{tmp_path}/follows"))
        wait_for(process, lambda: len(recorded.of(StartEvent)) > 0)
        cluster.add()
        wait_for(process, lambda: recorded.sizes().count(2) > 10)
        cluster.drain(first, deadline_s=60)
        wait_for(process, lambda: recorded.sizes()[-1] == 1)
        process.terminate()
        process.communicate()
    run = read_run(recorded.store)
    certificate = certify(run, data_of(run))
    assert certificate.holds, certificate.difference
    grown = recorded.rows()
    first_grown = next(place for place, row in enumerate(grown) if row["world_size"] == 2)
    before = grown[first_grown - 1]["samples"]
    assert {row["step_samples"] for row in grown if row["world_size"] == 1 and row["merged_steps"] == 1} == {24}
    assert any(row["step_samples"] == 48 for row in grown)
    for row in grown:
        climbed = min((row["samples"] - before) / 240, 1.0)
        # The last step of an epoch may have one global batch.
        factor = min(1.0 + climbed, row["merged_steps"]) if row["world_size"] == 2 else 1.0
        assert row["lr"] == pytest.approx(3e-4 * factor)
    changes = [(batch.samples, batch.lr_factor, batch.warmup_samples) for batch in recorded.of(BatchEvent)]
    assert changes[:3] == [(24, 1.0, 0.0), (48, 2.0, 240.0), (24, 1.0, 0.0)]
