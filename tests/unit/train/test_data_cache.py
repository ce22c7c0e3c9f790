"""Tests of runs whose cache of data cannot be written: they train on, and one event of the run says so."""

import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from numbers_job import numbers_job, trained

from undula.data.prepare.write import write_shards
from undula.data.spec import CacheSpec, DataSpec
from undula.data.stored.cache import DiskCache
from undula.data.stored.manifest import load_manifest
from undula.data.stored.reads import WindowReads
from undula.data.stored.tasks import rows_tasks
from undula.plan.order import EpochOrder
from undula.plan.plan import Plan, PlanSpec
from undula.state.events import CacheEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store, open_store, waits_reported_to
from undula.telemetry.hub import Hub
from undula.telemetry.waits import WaitPublisher
from undula.train.single_process import SingleProcess


def write_numbers(s3: Any) -> str:
    table = pa.table({"x": pa.array(range(48), pa.float32())})
    write_shards(open_store(s3.url("data")), [table], table.schema, 48, num_shards=4, row_group_bytes=64)
    return str(s3.url("data"))


def blocked(folder: Path) -> str:
    """Return the path of a folder that cannot be made, also by root."""
    (folder / "file").touch()
    return str(folder / "file" / "cache")


def test_a_run_whose_cache_cannot_be_written_trains_on_with_one_event(s3: Any, tmp_path: Path) -> None:
    folder = blocked(tmp_path)
    data = DataSpec(train=write_numbers(s3), cache=CacheSpec(folder=folder, max_gib=1.0))
    job = replace(numbers_job(tmp_path), data=data)
    hub = Hub(open_store(job.run_url))
    with waits_reported_to(WaitPublisher(hub.publish)):
        SingleProcess(lambda run: deque(trained(run), maxlen=0), job, hub.publish)()
    (event,) = until_recorded(open_store(job.run_url))
    assert (event.folder, event.problem) == (folder, "Not a directory")
    assert len(events_of(read_ledger(open_store(job.run_url)).events, CacheEvent)) == 1
    assert read_ledger(open_store(job.run_url)).steps["step"].to_pylist() == [0, 1, 2, 3]


def test_several_processes_that_lose_their_cache_cause_one_event(s3: Any, tmp_path: Path) -> None:
    """A read task reports to the hub of its job, as other processes of the run have done before."""
    manifest = load_manifest(write_numbers(s3))
    cache = DiskCache(blocked(tmp_path), 2**20)
    order = EpochOrder(Plan(PlanSpec(global_batch=2, virtual_workers=1), 48), manifest.row_counts, 0)
    reads = [WindowReads(manifest, manifest.columns, cache).of(window) for window in order.windows(0)]
    hub = Hub(Store(str(tmp_path / "run")))
    with waits_reported_to(WaitPublisher(hub.publish)):
        tasks = rows_tasks(reads, task_bytes=1)
    hub.publish(CacheEvent(cache.folder, "another host", "No space left on device"))
    assert sum(table.num_rows for task in tasks for table in task()) == 48
    assert cache.problem == "Not a directory"
    assert [type(message) for message in hub.read(0)[1]] == [CacheEvent]


def until_recorded(store: Store, limit_s: float = 60.0) -> list[CacheEvent]:
    deadline = time.monotonic() + limit_s
    while not (found := events_of(read_ledger(store).events, CacheEvent)):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # between two looks
    return found
