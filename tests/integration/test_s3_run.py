"""Tests of a job with its data and run directory on S3, over real HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_drivers import with_forked_drivers
from jobs_kit import STREAMED, Jobs
from s3_server import S3Proxy, serving
from study_kit import Studies
from waiting import wait_until

from undula.cluster.local import LocalCluster, local_cluster
from undula.data.prepare.corpora import stdlib_text
from undula.state.commit import find_commits
from undula.state.directory import JOB_FILE
from undula.state.events import StorageEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import open_store
from undula.study.progress import read_progress
from undula.study.records import REPORT, read_spec


@pytest.fixture(scope="module")
def proxy(s3_endpoint: str) -> Iterator[S3Proxy]:
    with serving(S3Proxy(s3_endpoint)) as server:
        yield server


@pytest.fixture(scope="module")
def s3_cluster(s3_env: dict[str, str], proxy: S3Proxy, forking_python: str) -> Iterator[LocalCluster]:
    """Cluster whose processes find the S3 server through the proxy."""
    env = {**s3_env, "AWS_ENDPOINT_URL": proxy.url}
    with local_cluster(num_cpus=4, env=env, python=forking_python) as cluster:
        yield with_forked_drivers(cluster)


def small_jobs(s3: Any, s3_cluster: LocalCluster, tmp_path: Path) -> Jobs:
    """Return jobs whose data and runs are in an empty bucket."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.py").write_text(f"text of file {number}\n" * 400)
    stdlib_text(context=32, root=source).write(s3.url("text"), num_shards=2, row_group_bytes=8192)
    return Jobs(s3_cluster, s3.url("text"), s3.url("runs"))


def test_data_and_run_directory_can_be_on_s3(s3: Any, s3_cluster: LocalCluster, tmp_path: Path) -> None:
    jobs = small_jobs(s3, s3_cluster, tmp_path)
    settings = (*STREAMED, "workers.max=2", "checkpoint.every_steps=10")
    done = jobs.run("on-s3", *settings, "plan.max_steps=20")
    assert done.status == 0, done.err
    assert done.column("step") == list(range(20))
    names = [entry.name for entry in done.store.list()]
    assert "job.json" in names
    assert any(name.startswith("tensorboard/events.out.tfevents") for name in names)
    assert [commit.step for commit in find_commits(done.store)[0]] == [20, 10]
    assert jobs.run("on-s3", *settings, "plan.max_steps=20").out.count("is finished") == 1
    assert s3.env["AWS_SECRET_ACCESS_KEY"] not in done.out + done.err


def test_a_run_waits_for_a_busy_store_and_says_so_once(
    s3: Any, s3_cluster: LocalCluster, proxy: S3Proxy, tmp_path: Path
) -> None:
    """The store refuses to send data to any process, from before the workers start until the run has reported it."""
    jobs = small_jobs(s3, s3_cluster, tmp_path)
    store = open_store(s3.url("runs/busy"))
    process = jobs.start("busy", *STREAMED, "workers.max=2", "plan.max_steps=5")
    try:
        wait_until(lambda: store.exists(JOB_FILE), 120, process)
        proxy.is_down = True
        wait_until(lambda: events_of(read_ledger(store).events, StorageEvent), 120, process)
    finally:
        proxy.is_down = False
    done = jobs.finish(process, "busy")
    assert done.status == 0, done.err
    assert done.column("step") == list(range(5))
    (event,) = events_of(done.ledger.events, StorageEvent)
    assert event.place == f"s3://{s3.bucket}"
    assert event.problem == "503 SlowDown (GetObject)"
    assert done.out.count(event.message) == 1


@pytest.mark.nightly
def test_a_study_on_s3_is_conducted_by_one_driver_of_a_cluster(
    s3, s3_cluster: LocalCluster, text: str, tmp_path: Path
) -> None:
    studies = Studies(s3_cluster, text, tmp_path)
    file = studies.file("on-s3", packed=1, base_lrs=[1e-2], overrides={"runs": s3.url("runs")})
    store = open_store(s3.url("runs/on-s3"))
    drivers = [studies.start(file) for _ in range(2)]
    outs = [driver.communicate(timeout=300)[0] for driver in drivers]
    assert sorted(driver.returncode for driver in drivers) == [0, 2], outs
    refused = next(out for out, driver in zip(outs, drivers, strict=True) if driver.returncode)
    assert "is being trained by another job on this cluster" in refused
    spec = read_spec(store)
    assert [record.state for record in read_progress(store, spec).records.values()] == ["complete"] * 2
    assert store.exists(f"{REPORT}/index.html")


@pytest.mark.usefixtures("s3")
def test_a_missing_bucket_is_named() -> None:
    from undula.errors import StorageError

    with pytest.raises(StorageError, match="s3://no-such-bucket/runs"):
        open_store("s3://no-such-bucket/runs").check_writable()
