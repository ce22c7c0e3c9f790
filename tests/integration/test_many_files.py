"""Tests of data sets of many small files on S3: few requests, a fast index, and a fast start of a run."""

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked_drivers import with_forked_drivers
from jobs_kit import Jobs
from s3_server import S3Proxy, moto_server, serving

from undula.cluster.local import local_cluster
from undula.data.stored.index import index
from undula.data.stored.manifest import load_manifest
from undula.storage import open_store
from undula.storage.s3 import forget_clients

MANY = 20_000
DELAY_S = 0.02
INDEXED_WITHIN_S, STARTED_WITHIN_S = 120.0, 10.0


def test_each_file_is_indexed_with_one_request(
    s3: Any, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": range(8)}), sink)
    store = open_store(s3.url("many"))
    for number in range(60):
        store.write(f"{number:03}.parquet", sink.getvalue().to_pybytes())
    with serving(S3Proxy(s3_endpoint)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        forget_clients()
        manifest = index(store.url, out=str(tmp_path))
        assert manifest.num_rows == 480
        assert len(proxy.authorizations) == 61  # one of them lists the files
        proxy.authorizations.clear()
        load_manifest(str(tmp_path)).check_files()
        assert len(proxy.authorizations) == 1


def test_a_manifest_is_found_without_a_listing_of_the_files(
    s3: Any, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(s3.url("named"))
    pq.write_table(pa.table({"x": range(8)}), sink := pa.BufferOutputStream())
    store.write("file-0.parquet", sink.getvalue().to_pybytes())
    index(store.url)
    for number in range(1, 1500):  # more than a page of a listing, with names between those of a manifest, old and new
        store.write(f"file-{number}.txt", b"")
    with serving(S3Proxy(s3_endpoint)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        forget_clients()
        load_manifest(store.url)
        assert len(proxy.authorizations) == 2  # one looks whether the manifest exists, and one reads it


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_many_files_are_indexed_and_a_run_on_them_starts_in_time(
    s3: Any, text: str, forking_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer of the server is delayed as one of a store in the same region would be. Both limits are for an idle machine."""
    (tmp_path / "one").mkdir()
    first = open_store(f"{text}/train").list()[1].name
    pq.write_table(pq.read_table(f"{text}/train/{first}").slice(0, 8), tmp_path / "one" / "data.parquet")
    with moto_server(DELAY_S, "many", tmp_path / "one", MANY, limit_s=300) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        forget_clients()
        url = "s3://many/data"
        began = time.monotonic()
        assert index(url).num_rows == 8 * MANY
        indexed_s = time.monotonic() - began
        env = {**s3.env, "AWS_ENDPOINT_URL": endpoint}
        with local_cluster(num_cpus=4, env=env, python=forking_python) as cluster:
            jobs = Jobs(with_forked_drivers(cluster), text, str(tmp_path / "runs"))
            jobs.run("warm-up", "plan.max_steps=2")  # the first run of a cluster also starts processes of Ray
            submitted = time.time()
            done = jobs.run("many", f"data.train={url}", "plan.max_steps=5")
        assert done.status == 0, done.err
        started_s = done.column("time")[0] - submitted
    print(f"\n{MANY:,} files: indexed in {indexed_s:.1f} s, first step {started_s:.1f} s after the submission")
    assert indexed_s < INDEXED_WITHIN_S
    assert started_s < STARTED_WITHIN_S
