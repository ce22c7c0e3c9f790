"""Tests with nodes that come and go: no step is lost or repeated, and the losses equal those of an undisturbed run."""

import time
from pathlib import Path

import pytest
from alone import train_alone
from chaos_kit import SCRIPT, SLOW_S, STEPS_ALONE, assert_certified, command, running

from undula.report.data.certificate import certify, data_of
from undula.report.data.run_record import read_run
from undula.state.commit import find_commits
from undula.state.events import BatchEvent, CheckpointEvent, ResizeEvent, SaveEvent, StartEvent
from undula.state.ledger import read_ledger
from undula.testing.nodes import Nodes

pytestmark = pytest.mark.timeout(900)


def test_growth_and_a_notice_to_rank_0_lose_no_step_and_change_no_bit(spot: Nodes, text: str, tmp_path: Path) -> None:
    with running(spot, text, tmp_path, 1, "workers.max=2", pace_s=SLOW_S) as job:
        (first,) = spot.nodes
        second = spot.add()
        job.wait_for(lambda: 2 in job.sizes())
        spot.drain(first, deadline_s=60)
        job.wait_for(lambda: job.sizes()[-1] == 1)
        assert set(spot.nodes) == {first, second}  # the group has left the node before the node ends
        spot.drain(second, deadline_s=200)  # the node of the only worker: its replacement may start slowly
        spot.add()
        job.wait_for(lambda: len(job.of(StartEvent)) == 4)
        resumed = job.of(StartEvent)[-1]
        job.wait_for(lambda: job.rows()[-1]["step"] > (resumed.step or 0))
    for node in (first, second):
        spot.kill(node)
    ledger = read_ledger(job.store)
    assert [(resize.before, resize.after) for resize in job.of(ResizeEvent)[:3]] == [(1, 2), (2, 1), (1, 1)]
    assert resumed.origin == "the memory of a worker"
    assert ledger.steps["step"].to_pylist() == list(range(ledger.steps.num_rows))
    assert ledger.replaced.num_rows == 0

    # With a constant rate, a shorter run equals the beginning of a longer one.
    shorter = (*STEPS_ALONE, f"plan.max_steps={ledger.steps.num_rows + 1}")
    alone = train_alone(command(text, str(tmp_path), "alone", *shorter, script=SCRIPT))
    assert_certified(job.store.url, alone.url, ledger.steps.num_rows)


@pytest.mark.nightly
def test_a_run_that_falls_below_min_workers_saves_trains_until_shortly_before_the_deadline_and_waits(
    spot: Nodes, text: str, tmp_path: Path
) -> None:
    with running(spot, text, tmp_path, 2, "workers.min=2", "workers.max=2") as job:
        doomed = spot.nodes[-1]
        deadline = time.time() + 14
        spot.drain(doomed, deadline_s=14)
        job.wait_for(lambda: len(job.of(CheckpointEvent)) > 0)
        first = find_commits(job.store)[0][0].step
        job.wait_for(job.waits_for_one_worker)
        last = find_commits(job.store)[0][0].step
        assert last > first + 5
        assert job.of(CheckpointEvent)[-1].time < deadline
        spot.kill(doomed)
        spot.add()
        job.wait_for(lambda: (last, 2) in [(start.step, start.world_size) for start in job.of(StartEvent)])
    assert [save.lead_s for save in job.of(SaveEvent)] == [5.0, None]
    assert read_ledger(job.store).replaced.num_rows == 0


@pytest.mark.nightly
def test_a_run_whose_only_node_is_lost_resumes_from_the_copy_on_the_head(
    spot: Nodes, text: str, tmp_path: Path
) -> None:
    with running(spot, text, tmp_path, 1, "workers.max=1") as job:
        job.wait_for(lambda: len(job.rows()) > 50)
        spot.kill(spot.nodes[0])
        reached = len(job.rows())
        spot.add()
        job.wait_for(lambda: len(job.of(StartEvent)) > 1)
        job.wait_for(lambda: len(job.rows()) > reached + 50)
    assert job.of(StartEvent)[1].origin == "the memory of the head"
    run = read_run(job.store)
    certificate = certify(run, data_of(run))
    assert certificate.holds, certificate.difference


@pytest.mark.nightly
def test_a_held_state_survives_the_loss_of_its_node(spot: Nodes, text: str, tmp_path: Path) -> None:
    with running(spot, text, tmp_path, 2, "workers.min=2", "workers.max=2") as job:
        last, lost = spot.nodes
        job.wait_for(lambda: len(job.rows()) > 50)
        spot.kill(lost)
        job.wait_for(job.waits_for_one_worker)
        actors = spot.count()["actors"]
        spot.drain(last, deadline_s=30)
        # The worker has handed over its state and is released.
        job.wait_for(lambda: spot.count()["actors"] < actors)
        spot.kill(last)
        for _ in range(2):
            spot.add()
        job.wait_for(lambda: len(job.of(StartEvent)) > 1)
    assert job.of(StartEvent)[1].origin == "the memory of the head"
    ledger = read_ledger(job.store)
    assert ledger.steps["step"].to_pylist() == list(range(ledger.steps.num_rows))
    assert ledger.replaced.num_rows == 0


@pytest.mark.nightly
def test_an_elastic_batch_follows_the_workers_and_the_rate_follows_the_batch(
    spot: Nodes, text: str, tmp_path: Path
) -> None:
    batch = (
        "plan.batch=elastic",
        "schedule.base_lr=3e-4",
        "schedule.batch_rule=linear",
        "schedule.rewarm_samples=240",
        "schedule.warmup_samples=0",
    )
    with running(spot, text, tmp_path, 1, "workers.max=2", *batch, pace_s=SLOW_S) as job:
        (first,) = spot.nodes
        spot.add()
        job.wait_for(lambda: job.sizes().count(2) > 10)
        spot.drain(first, deadline_s=60)
        job.wait_for(lambda: job.sizes()[-1] == 1)
    spot.kill(first)
    run = read_run(job.store)
    certificate = certify(run, data_of(run))
    assert certificate.holds, certificate.difference
    grown = job.rows()
    first_grown = next(place for place, row in enumerate(grown) if row["world_size"] == 2)
    before = grown[first_grown - 1]["samples"]
    assert {row["step_samples"] for row in grown if row["world_size"] == 1 and row["merged_steps"] == 1} == {24}
    assert any(row["step_samples"] == 48 for row in grown)
    for row in grown:
        climbed = min((row["samples"] - before) / 240, 1.0)
        # The last step of an epoch may have one global batch.
        factor = min(1.0 + climbed, row["merged_steps"]) if row["world_size"] == 2 else 1.0
        assert row["lr"] == pytest.approx(3e-4 * factor)
    changes = [(batch.samples, batch.lr_factor, batch.warmup_samples) for batch in job.of(BatchEvent)]
    assert changes[:3] == [(24, 1.0, 0.0), (48, 2.0, 240.0), (24, 1.0, 0.0)]
