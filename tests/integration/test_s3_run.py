"""Tests of a job with its data and run directory on S3, over real HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from forking.drivers import with_forked_drivers
from jobs_kit import STREAMED, Jobs
from study_kit import Studies

from undula.cluster.local import LocalCluster, local_cluster
from undula.data.corpora import stdlib_text
from undula.state.commit import find_commits
from undula.storage import open_store
from undula.study.progress import read_progress
from undula.study.records import REPORT, read_spec


@pytest.fixture(scope="module")
def s3_cluster(s3_env: dict[str, str], forking_python: str) -> Iterator[LocalCluster]:
    """Cluster whose processes find the S3 server."""
    with local_cluster(num_cpus=4, env=s3_env, python=forking_python) as cluster:
        yield with_forked_drivers(cluster)


def test_data_and_run_directory_can_be_on_s3(s3, s3_cluster: LocalCluster, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.py").write_text(f"text of file {number}\n" * 400)
    stdlib_text(context=32, root=source).write(s3.url("text"), num_shards=2, row_group_bytes=8192)
    jobs = Jobs(s3_cluster, s3.url("text"), s3.url("runs"))
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


def test_a_study_on_s3_is_conducted_by_one_driver_of_a_cluster(
    s3, s3_cluster: LocalCluster, text: str, tmp_path: Path
) -> None:
    studies = Studies(s3_cluster, text, tmp_path)
    file = studies.file("on-s3", packed=1, base_lrs=[1e-2], overrides={"runs": s3.url("runs")})
    store = open_store(s3.url("runs/on-s3"))
    drivers = [studies.start(file) for _ in range(2)]
    outs = [driver.communicate(timeout=240)[0] for driver in drivers]
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
