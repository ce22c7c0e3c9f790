"""Tests of commands that poll a run while it trains, grows, shrinks and is killed: they never fail, and see a whole run at any moment."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from chaos_kit import Running, running
from poller import polled
from s3_server import S3Proxy, Takes, serving
from small_text import write_text

from undula.report.data.certificate import certify, data_of
from undula.report.data.run_record import read_run
from undula.state.ledger_files import file_names
from undula.storage import Store
from undula.storage.s3 import forget_clients
from undula.storage.s3_requests import forget_forms
from undula.testing.nodes import Nodes, nodes

OFTEN = """
def prepared(module):
    from undula.state import ledger

    ledger.FLUSH_INTERVAL_S = 0.2
    ledger.FILES_PER_TIER = 4
    return module
"""
"""Code with which a worker writes and merges files of the ledger more often, as otherwise only a run of hours does."""
POLL_FOR_S = 300.0


def has_merged(store: Store) -> bool:
    return any("-merged-" in name for name in file_names(store))


def grow(spot: Nodes, job: Running) -> None:
    """Add a node, and wait until a group of two has made a few steps."""
    last = job.rows()[-1]["attempt"]
    spot.add()
    job.wait_for_group(2, after=last, steps=3)


def lose_a_node(spot: Nodes, job: Running) -> None:
    """Kill the older of two nodes, and wait until a group of one has made a few steps."""
    last = job.rows()[-1]["attempt"]
    spot.kill(spot.nodes[0])
    job.wait_for_group(1, after=last, steps=3)


def leave(spot: Nodes, job: Running) -> None:
    """Announce the end of the older of two nodes, and wait until a group of one has made a few steps."""
    last, node = job.rows()[-1]["attempt"], spot.nodes[0]
    spot.drain(node, deadline_s=60)
    job.wait_for_group(1, after=last, steps=3)
    spot.kill(node)


def assert_whole(job: Running) -> None:
    run = read_run(job.store)
    certificate = certify(run, data_of(run))
    assert certificate.holds, certificate.difference


@pytest.mark.nightly
def test_a_run_is_whole_whenever_somebody_looks(spot: Nodes, text: str, tmp_path: Path) -> None:
    with running(spot, text, tmp_path, 1, "workers.max=2", hook=OFTEN) as job:
        job.wait_for(lambda: len(job.rows()) > 0)
        with polled(str(tmp_path), "run") as polls:
            grow(spot, job)
            lose_a_node(spot, job)
            job.wait_for(lambda: polls.refresh().least > 3 and polls.attempts >= 3 and has_merged(job.store))
    assert_whole(job)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("takes", ["any", "quoted", "bare"])
def test_a_run_on_s3_is_whole_during_minutes_of_polls(
    s3: Any, s3_endpoint: str, forking_python: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, takes: str
) -> None:
    with ExitStack() as stack:
        url = s3_endpoint
        if takes != "any":
            url = stack.enter_context(serving(S3Proxy(s3_endpoint, cast(Takes, takes)))).url
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        forget_clients()
        forget_forms()
        env, runs = {**s3.env, "AWS_ENDPOINT_URL": url}, s3.url("runs")
        text = write_text(tmp_path, s3.url("text"))
        spot = stack.enter_context(nodes(env=env, python=forking_python))
        job = stack.enter_context(
            running(spot, text, tmp_path, 1, "workers.max=2", "checkpoint.every_steps=50", hook=OFTEN, runs=runs)
        )
        job.wait_for(lambda: len(job.rows()) > 0)
        polls = stack.enter_context(polled(runs, "run", env, processes=2))
        ends_at, rounds = time.monotonic() + POLL_FOR_S, 0
        while time.monotonic() < ends_at:
            grow(spot, job)
            (lose_a_node if rounds % 2 == 0 else leave)(spot, job)
            rounds += 1
            print({**polls.refresh().counts, "steps": polls.steps, "attempts": polls.attempts}, flush=True)
        assert rounds >= 2
        assert has_merged(job.store)
        assert_whole(job)
