"""Tests of the stream with real executions of Ray Data, one for each rank: it has the samples of the plan in order, despite delays."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import write_table
from s3_server import Fault, S3Proxy, serving

from undula.cluster.local import LocalCluster
from undula.data import stream
from undula.data.stored.manifest import load_manifest
from undula.plan.order import EpochOrder
from undula.plan.plan import Plan, PlanSpec

NUM_ROWS = 3000
PLAN_FIELDS = {"global_batch": 96, "virtual_workers": 6, "window": 3, "epochs": 2}
PLAN = PlanSpec(**PLAN_FIELDS)
RANKS = """
import json, logging, os, sys, time
import ray
from undula.data import stream
from undula.plan.plan import PlanSpec
aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
ray.init(log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": aws} if aws else None)
for line in sys.stdin:
    url, plan, world_size, start, reading, slow_s = json.loads(line)
    plan = PlanSpec(**plan)
    ranks = [stream(url, plan, rank=r, world_size=world_size, head_mib=0, **reading) for r in range(world_size)]
    for each in ranks:
        each.load_state_dict({**each.state_dict(), "step": start})
    steps = []
    for batches in zip(*ranks, strict=True):
        for each, batch in zip(ranks, batches, strict=True):
            assert batch["value"].tolist() == (each.ids + 1000).tolist()
        steps.append([int(row) for each in ranks for row in each.ids])
        time.sleep(slow_s)
    print("STEPS", json.dumps(steps), flush=True)
"""


class Reader:
    """Driver process whose ranks read streams, each with its own execution."""

    def __init__(self, cluster: LocalCluster, folder: Path):
        self._errors = folder / "errors"
        self._process = subprocess.Popen(
            [cluster.python, "-c", RANKS],
            env={**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors.open("w"),
            text=True,
        )

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def steps(
        self,
        url: str | dict[str, float],
        world_size: int,
        start: int = 0,
        slow_s: float = 0.0,
        **reading: object,
    ) -> list[list[int]]:
        """Return the sample ids of each step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps((url, PLAN_FIELDS, world_size, start, reading, slow_s)) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("STEPS"):
                steps: list[list[int]] = json.loads(line.removeprefix("STEPS"))
                return steps
        raise AssertionError(self._errors.read_text()[-3000:])


@pytest.fixture
def reader(cluster: LocalCluster, tmp_path: Path) -> Iterator[Reader]:
    with Reader(cluster, tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a data set with row groups of 50 rows, each with a number and a kilobyte."""
    return write_rows(tmp_path_factory.mktemp("stream"), 1000, NUM_ROWS)


def write_rows(where: Path | str, first: int, rows: int) -> str:
    columns = {"value": np.arange(first, first + rows), "payload": [bytes([row % 251]) * 1000 for row in range(rows)]}
    return write_table(where, columns, num_shards=3, row_group_bytes=50_000).url


def planned(url: str, start: int = 0) -> list[list[int]]:
    manifest = load_manifest(url)
    plan = Plan(PLAN, manifest.num_rows)
    shapes = [plan.step(step) for step in range(start, plan.total_steps)]
    orders = {epoch: EpochOrder(plan, manifest.row_counts, epoch) for epoch in range(2)}
    return [orders[shape.epoch].step_ids(shape.step_in_epoch).tolist() for shape in shapes]


@pytest.mark.parametrize("world_size", [1, 4])
def test_every_world_size_streams_the_samples_of_the_plan(reader: Reader, url: str, world_size: int) -> None:
    assert reader.steps(url, world_size) == planned(url)


def test_ray_data_reads_the_same_mix_as_this_process(reader: Reader, url: str, tmp_path: Path) -> None:
    other = write_rows(tmp_path, 1000 + NUM_ROWS, 700)  # ids of a mix continue from one data set to the next
    mix = {url: 3.0, other: 1.0}
    here = stream(mix, PLAN)
    expected = [here.ids.tolist() for _ in here]
    assert reader.steps(mix, 1) == expected
    assert reader.steps(mix, 3, start=35) == expected[35:]


@pytest.mark.parametrize("start", [17, 31])
def test_a_resume_continues_at_the_step_of_the_plan(reader: Reader, url: str, start: int) -> None:
    """The steps are in the middle of a row group, and at the short last step of an epoch."""
    assert reader.steps(url, 2, start) == planned(url, start)


@pytest.mark.parametrize(
    "reading",
    [{"prefetch_mib": 1, "read_tasks": 1}, {"read_tasks": 8, "read_cpus": 1.0}],
)
def test_neither_prefetch_nor_data_cpus_change_the_order(reader: Reader, url: str, reading: dict[str, object]) -> None:
    assert reader.steps(url, 2, **reading) == planned(url)


@pytest.mark.nightly
def test_temporary_faults_of_s3_lose_no_sample(
    cluster: LocalCluster, s3: Any, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = write_rows(s3.url("stream"), 1000, NUM_ROWS)
    expected = planned(url, 21)
    faults: list[Fault] = ["503", "reset", "truncated", "slow", "slow down", "short"]
    with serving(S3Proxy(s3_endpoint)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.slow_s = 0.5
        proxy.faults.extend(faults * 5)
        with Reader(cluster, tmp_path) as own:
            assert own.steps(url, 2, start=21) == expected
        assert not proxy.faults


def printed(cluster: LocalCluster, script: str, url: str) -> list[Any]:
    """Run a script on the data set as a driver, and return the values that it prints after FOUND."""
    env = {**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address}
    done = subprocess.run([cluster.python, "-c", script, url], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line.removeprefix("FOUND")) for line in done.stdout.splitlines() if line.startswith("FOUND")]


MAPS = """
import hashlib, json, logging, sys, traceback
import numpy as np
import ray
from undula.data import stream
from undula.plan.plan import PlanSpec
ray.init(log_to_driver=False, logging_level=logging.ERROR)
plan = PlanSpec(global_batch=96, virtual_workers=6, window=3, shuffle="none")

def images(sample, rng):
    image = np.full((2, 3), sample["value"], ">f4") + rng.normal(size=(2, 3)).astype(np.float32)
    return {"name": str(sample["value"]), "image": image}

def wider_later(sample, rng):
    return {"x": np.float32(1) if sample["value"] < 2500 else np.float64(1)}

class ImageError(Exception):
    def __init__(self, number):
        super().__init__(number)

def fails_later(sample, rng):
    if sample["value"] == 2500:
        raise ImageError(7)
    return sample

for head_mib in (0, 1000):  # read by Ray Data's tasks, and by the rank itself
    for function in (images, wider_later, fails_later):
        read = []
        try:
            for batch in stream(sys.argv[1], plan, map=function, head_mib=head_mib):
                read.append({name: (str(getattr(of, "dtype", "")), np.asarray(of).tolist()) for name, of in batch.items()})
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            read = [type(error).__name__, str(error), "in fails_later" in text, "raised by the map for sample 1500 of" in text]
        print("FOUND", json.dumps(read))
"""


def test_read_tasks_hold_maps_to_the_same_columns_as_ranks_do(cluster: LocalCluster, url: str) -> None:
    images, changes, fails, *own = printed(cluster, MAPS, url)
    assert own == [images, changes, fails]
    assert len(images) == -(-NUM_ROWS // 96)
    assert np.asarray(images[0]["image"][1]).shape == (96, 2, 3)
    assert changes[0] == "UsageError"
    assert f"'x' as float64[] for sample 1500 of {url}, but as float32[] for the first sample" in changes[1]
    assert fails == ["ImageError", "7", True, True]


WAITING = """
import json, logging, sys, time
import ray
from undula.data import stream
from undula.plan.plan import PlanSpec
ray.init(log_to_driver=False, logging_level=logging.ERROR)
plan = PlanSpec(global_batch=96, virtual_workers=6, window=3, epochs=200)
batches = iter(stream(sys.argv[1], plan, head_mib=0, prefetch_mib=8))
for _ in range(20):
    next(batches)
shares = []
while len(shares) < 20 and min(shares, default=1) >= 0.3:  # until what may be read ahead is there
    began = time.process_time()
    time.sleep(1)
    shares.append(time.process_time() - began)
print("FOUND", min(shares))
"""


def test_reading_ahead_takes_no_core_from_slow_training(cluster: LocalCluster, url: str) -> None:
    """The execution has not ended but has nothing to do. Without a limit, it would use a core. It still runs when the script ends."""
    (cpu_share,) = printed(cluster, WAITING, url)
    assert cpu_share < 0.3


CLOSED = """
import gc, json, logging, sys, threading, time, warnings
import ray
from ray.util.annotations import RayDeprecationWarning
from undula.data import stream
from undula.plan.plan import PlanSpec
warnings.simplefilter("error", RayDeprecationWarning)
ray.init(log_to_driver=False, logging_level=logging.ERROR)

def stored_mib():
    size, free = (found().get("object_store_memory", 0) for found in (ray.cluster_resources, ray.available_resources))
    return (size - free) / 2**20

def reading():
    return [each.name for each in threading.enumerate() if each.name.startswith(("undula-read-ahead", "StreamingExecutor"))]

plan = PlanSpec(global_batch=96, virtual_workers=6, window=3, epochs=20)
before = stored_mib()
for steps in (0, 1, 3, 20, 1, 3):
    batches = iter(stream(sys.argv[1], plan, head_mib=0, prefetch_mib=8))
    for _ in range(steps):
        next(batches)
    batches.close()
del batches
deadline = time.monotonic() + 60
while (stored_mib() > before + 0.1 or reading()) and time.monotonic() < deadline:
    gc.collect()  # Ray Data's executors are in reference cycles
    time.sleep(0.1)  # limits the polling rate
print("FOUND", json.dumps([stored_mib() - before, reading()]))
"""


def test_closed_streams_leave_nothing_in_the_object_store(cluster: LocalCluster, url: str) -> None:
    ((left_mib, threads),) = printed(cluster, CLOSED, url)
    assert left_mib < 0.1
    assert threads == []
