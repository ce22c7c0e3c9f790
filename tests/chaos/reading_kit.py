"""Ranks that read a stream on nodes of a cluster, without training. The test can kill nodes while they read."""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from data_sets import write_table
from waiting import wait_until

from undula.cluster.local import LocalCluster
from undula.data import stream
from undula.plan.plan import PlanSpec

LIMIT_S = 300.0
"""Maximum time in seconds that a test waits for ranks."""
DRIVER = """
import json, logging, os, sys, time
from pathlib import Path
import psutil, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
settings = json.loads(sys.argv[1])
ray.init(log_to_driver=False, logging_level=logging.ERROR)

class Mapped:
    # Adds the node that reads a sample. One sample makes its task wait as long as the file `hold` exists.
    def __init__(self, held, folder):
        self.held, self.folder = held, Path(folder)
    def __call__(self, sample, rng):
        node = ray.get_runtime_context().get_node_id()
        if sample["value"] == self.held:
            (self.folder / f"held-{node}").touch()
            while (self.folder / "hold").exists():
                time.sleep(0.05)
        return {"value": sample["value"], "node": node}

@ray.remote(max_concurrency=2)
class Rank:
    def __init__(self, rank, settings):
        from undula.data.stored import tasks
        from undula.data import stream
        from undula.plan.plan import PlanSpec
        tasks.PATIENCE_S = settings["patience_s"]
        self.steps, self.nodes, self.resident = [], [], []
        mapped = Mapped(settings["held"], settings["folder"]) if settings["mapped"] else None
        self.source = stream(
            settings["url"], PlanSpec(**settings["plan"]), rank=rank, world_size=len(settings["ranks"]),
            map=mapped, head_mib=0, **settings["reading"],
        )
        self.batches = iter(self.source)
    def step(self):
        batch = next(self.batches, None)
        if batch is None:
            return False
        assert batch["value"].tolist() == (self.source.ids + 1000).tolist()
        self.steps.append(self.source.ids.tolist())
        self.nodes.extend(set(batch.get("node", ())))
        memory = psutil.Process().memory_info()  # shared pages are those of the object store
        self.resident.append((memory.rss - memory.shared) / 2**20)
        return True
    def run(self, slow_s):
        while self.step():
            time.sleep(slow_s)
    def found(self):
        return {"steps": self.steps, "nodes": sorted(set(self.nodes)), "resident_mib": self.resident}
    def progress(self):
        return len(self.steps)

def stored_mib():
    size, free = (found().get("object_store_memory", 0) for found in (ray.cluster_resources, ray.available_resources))
    return (size - free) / 2**20

def asked(method, number):
    # Asks a rank, unless it is lost.
    if number not in lost:
        try:
            return ray.get(getattr(ranks[number], method).remote())
        except ray.exceptions.RayActorError:
            lost.append(number)

lost, stored, begin = [], [], stored_mib()
ranks = [
    Rank.options(
        num_cpus=place["num_cpus"],
        scheduling_strategy=NodeAffinitySchedulingStrategy(place["node"], soft=False) if place["node"] else None,
    ).remote(number, settings)
    for number, place in enumerate(settings["ranks"])
]
if settings["in_lockstep"]:
    while any([asked("step", number) for number in range(len(ranks))]):
        stored.append(stored_mib() - begin)
        print("PROGRESS", json.dumps([asked("progress", number) for number in range(len(ranks))]), flush=True)
else:
    running = {rank.run.remote(place["slow_s"]): number for number, (rank, place) in enumerate(zip(ranks, settings["ranks"]))}
    while running:
        done, _ = ray.wait(list(running), timeout=0.1)
        stored.append(stored_mib() - begin)
        for ref in done:
            number = running.pop(ref)
            try:
                ray.get(ref)
            except ray.exceptions.RayActorError:
                lost.append(number)
        print("PROGRESS", json.dumps([asked("progress", number) for number in range(len(ranks))]), flush=True)
found = [asked("found", number) for number in range(len(ranks))]
print("FOUND", json.dumps({"ranks": found, "stored_mib": stored}), flush=True)
"""


@dataclass(frozen=True)
class Place:
    """Where a rank reads, and how."""

    node: str | None
    """Id of its node; None lets Ray choose."""
    num_cpus: float = 0.0
    """Number of CPUs that the rank holds."""
    slow_s: float = 0.0
    """Seconds between two steps, unless the ranks are in lockstep."""


@dataclass(frozen=True)
class Reading:
    """What ranks read."""

    url: str
    plan: dict[str, Any]
    ranks: Sequence[Place]
    folder: str
    """Folder for the files `hold` and `held-NODE`."""
    reading: dict[str, Any] = field(default_factory=dict)
    """Fields of DataSpec."""
    in_lockstep: bool = False
    """Whether every rank waits for the others after each step, as in training."""
    mapped: bool = False
    """Whether samples are mapped, so that their nodes are known."""
    held: int | None = None
    """Value of the sample whose task waits as long as `hold` exists."""
    patience_s: float = 5.0

    def expected(self, rank: int) -> list[list[int]]:
        """Return the ids of a rank's steps, read in this process."""
        batches = stream(self.url, PlanSpec(**self.plan), rank=rank, world_size=len(self.ranks), head_mib=10**6)
        return [batches.ids.tolist() for _ in batches]


@dataclass(frozen=True)
class RankFound:
    """What a rank has read."""

    steps: list[list[int]]
    nodes: list[str]
    """Nodes on which its samples were read."""
    resident_mib: list[float]
    """Memory of its process in MiB after each step, without the object store."""


class Readers:
    """Ranks that read."""

    def __init__(self, process: subprocess.Popen[str], errors: Path):
        self._process = process
        self._errors = errors
        self._progress: list[int | None] = []
        self._found: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, LIMIT_S, self._process, lambda: (self._progress, self._errors.read_text()[-3000:]))

    def wait_for_steps(self, rank: int, count: int) -> None:
        """Wait until a rank has made `count` steps."""
        self.wait_for(lambda: bool(self._progress) and (self._progress[rank] or 0) >= count)

    def has_ended(self) -> bool:
        """Return whether all ranks have read everything."""
        return not self._thread.is_alive()

    def finish(self) -> list[RankFound | None]:
        """Wait until all ranks have read everything, and return what they have read; None for a rank whose node was lost."""
        self._thread.join(timeout=LIMIT_S)
        assert self._found, (self._progress, self._errors.read_text()[-3000:])
        return [RankFound(**found) if found else None for found in self._found["ranks"]]

    def most_stored_mib(self) -> float:
        """Return the largest size in MiB of the cluster's object stores while the ranks read."""
        return float(max(self._found["stored_mib"]))

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, _, value = line.partition(" ")
            if kind == "PROGRESS":
                self._progress = json.loads(value)
            elif kind == "FOUND":
                self._found = json.loads(value)


@contextmanager
def readers(cluster: LocalCluster, reading: Reading) -> Iterator[Readers]:
    """Start ranks that read, and end them after the block."""
    errors = Path(reading.folder) / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(
            [cluster.python, "-c", DRIVER, json.dumps(asdict(reading))],
            env={**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    try:
        yield Readers(process, errors)
    finally:
        process.kill()
        process.wait()


def write_rows(folder: Path, rows: int, row_bytes: int, group_rows: int) -> str:
    """Write a data set of numbers from 1000 on with noise, in row groups of `group_rows` rows, and return its URL."""
    noise = np.random.default_rng(0).bytes(2 * row_bytes)
    payload = pa.array([noise[row % row_bytes : row % row_bytes + row_bytes] for row in range(rows)], pa.binary())
    columns = {"value": np.arange(1000, 1000 + rows), "payload": payload}
    return write_table(folder, columns, num_shards=2, row_group_bytes=group_rows * (row_bytes + 8)).url
