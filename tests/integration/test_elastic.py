"""Nodes come and go while a job runs: no step is lost or repeated, and the losses stay those of a run left alone."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from integration_kit import Jobs, relative_difference

from undula.state.commit import find_commits
from undula.state.ledger import read_ledger
from undula.storage import open_store
from undula.testing.nodes import nodes

SETTINGS = (
    *("checkpoint.every_steps=1000", "data.validation=null", "workers.grow=always", "schedule.decay=constant"),
    *("schedule.base_lr=3e-4", "config.model.width=128", "config.model.layers=4"),
)


def test_growth_and_a_notice_to_rank_0_lose_and_repeat_no_step_and_change_no_loss(
    session_jobs: Jobs, tmp_path: Path
) -> None:
    with nodes() as cluster:
        first = cluster.add()
        cluster.await_all()
        jobs = Jobs(cluster.cluster, session_jobs.text, str(tmp_path))
        process = jobs.start("moved", *SETTINGS, "plan.max_steps=3000", "workers.min=1", "workers.max=2")
        store = open_store(f"{tmp_path}/moved")

        def sizes() -> list[int]:
            return read_ledger(store).steps["world_size"].to_pylist() if store.exists("ledger") else []

        def wait_for(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 120
            while not condition():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.2)  # paces the looks

        wait_for(lambda: len(sizes()) > 0)
        second = cluster.add()
        wait_for(lambda: 2 in sizes())
        cluster.drain(first, deadline_s=60)
        wait_for(lambda: sizes()[-1] == 1)
        assert set(cluster.nodes) == {first, second}  # the group has left before the node has gone
        process.terminate()
        process.communicate()
    ledger = read_ledger(store)
    resizes = [json.loads(event["data"]) for event in ledger.events.to_pylist() if event["kind"] == "resize"]
    assert [(data["from"], data["to"]) for data in resizes[:2]] == [(1, 2), (2, 1)]
    moved = ledger.steps
    assert moved["step"].to_pylist() == list(range(moved.num_rows))
    assert ledger.replaced.num_rows == 0

    # With a constant rate a shorter run is the beginning of a longer one.
    alone = session_jobs.run("not-moved", *SETTINGS, f"plan.max_steps={moved.num_rows}", *session_jobs.workers(1))
    assert alone.status == 0, alone.err
    assert alone.column("sample_digest") == moved["sample_digest"].to_pylist()
    assert relative_difference(moved["loss"].to_pylist(), alone.column("loss")) < 1e-4


def test_below_the_fewest_workers_the_step_is_saved_and_the_run_waits(session_jobs: Jobs, tmp_path: Path) -> None:
    with nodes() as cluster:
        cluster.add()
        doomed = cluster.add()
        cluster.await_all()
        jobs = Jobs(cluster.cluster, session_jobs.text, str(tmp_path))
        process = jobs.start("waits", *SETTINGS, "plan.max_steps=3000", "workers.min=2", "workers.max=2")
        store = open_store(f"{tmp_path}/waits")

        def told(kind: str, words: str = "") -> bool:
            events = read_ledger(store).events.to_pylist() if store.exists("ledger") else []
            return any(event["kind"] == kind and words in event["message"] for event in events)

        def wait_for(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 120
            while not condition():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.2)  # paces the looks

        wait_for(lambda: store.exists("ledger") and read_ledger(store).steps.num_rows > 0)
        cluster.drain(doomed, deadline_s=20)
        wait_for(lambda: told("checkpoint"))
        wait_for(lambda: told("waiting", "waiting for 1 more worker of 1 CPU"))
        saved = find_commits(store)[0][0].step
        cluster.kill(doomed)
        cluster.add()
        wait_for(lambda: told("start", f"of step {saved} with 2 workers"))
        process.terminate()
        process.communicate()
    assert told("notice", "saving, then waiting: 1 of 2 workers on nodes that will go, 1 left, at least 2 needed")
    assert read_ledger(store).replaced.num_rows == 0
