"""Outages and lost steps when workers and nodes are added and lost: Undula and Ray Train, and torchrun and torchft for a killed worker.

    make bench-elastic

The main job's model, two nodes of one CPU each, the same faults one after another in one job. Outage: the longest time without a step
from the fault until the group of the new size has made five; a planned change counts from its notice, and so does its own pause alone.
Steps lost: those that are done again after it. Ray Train and torchrun save a checkpoint every 10 steps.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil

from tests.baselines.foreign import torchft_path
from tests.baselines.result import print_and_write
from undula.data.prepare.corpora import stdlib_text
from undula.state.ledger import read_ledger
from undula.state.processes import descendants, end_group, send_signal
from undula.storage import Store, open_store
from undula.testing.nodes import Nodes, nodes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS_AFTER = 5
LIMIT_S = 240.0
HANG_LIMIT_S = 120.0
SETTLE_STEPS = 15
"""Number of steps between two faults, so that their effects do not overlap and the last checkpoint is not always recent."""


@dataclass(frozen=True)
class Made:
    """Completed step."""

    step: int
    time: float
    world: int


class Job:
    """Job of a contender and its completed steps."""

    def __init__(self, command: Sequence[str], env: dict[str, str], made: Callable[[], list[Made]]):
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.made = made

    def await_steps(self, count: int, world: int | None, since: float, limit_s: float = LIMIT_S) -> list[Made]:
        """Wait until a group of this size, or of any size for None, has made the last `count` steps after a time."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            made = sorted(self.made(), key=lambda each: each.time)
            last = [each for each in made if each.time > since][-count:]
            if len(last) == count and all(each.world == (world or each.world) for each in last):
                return made
            if self.process.poll() is not None:
                raise RuntimeError(f"the job ended with {self.process.returncode}")
            time.sleep(0.25)  # paces the looks
        raise TimeoutError(f"no group of {world} within {limit_s:.0f} s")

    def stop(self) -> None:
        end_group(self.process, patience_s=20)


def undula_job(cluster: Nodes, data: str, folder: str, engine: str = "torch") -> Job:
    command = [
        *(sys.executable, str(ROOT / "jobs" / "language_model.py"), "name=job", f"runs={folder}"),
        *(f"data.train={data}/train", "data.validation=null", "plan.max_steps=100000", "schedule.decay=constant"),
        *("schedule.base_lr=3e-4", "workers.min=1", "workers.max=2", "checkpoint.every_steps=200"),
        f"engine={engine}",
    ]
    store = open_store(f"{folder}/job")

    return Job(command, client_env(cluster), lambda: ledger_steps(store))


def ledger_steps(store: Store) -> list[Made]:
    """Return the completed steps of a run by its ledger, including those that were done again."""
    if not store.exists("ledger"):
        return []
    ledger = read_ledger(store)
    rows = ledger.steps.to_pylist() + ledger.replaced.to_pylist()
    return [Made(row["step"], row["time"], row["world_size"]) for row in rows]


def ray_job(cluster: Nodes, data: str, folder: str) -> Job:
    out = Path(folder) / "steps.jsonl"
    script = str(HERE / "elastic_ray.py")
    return Job([sys.executable, script, f"{data}/train", str(out), folder], client_env(cluster), lambda: lines(out))


def client_env(cluster: Nodes) -> dict[str, str]:
    return {**os.environ, **cluster.cluster.env, "RAY_ADDRESS": cluster.cluster.address}


def lines(out: Path) -> list[Made]:
    text = out.read_text() if out.exists() else ""
    return [Made(**json.loads(line)) for line in text.splitlines()]


def measured(job: Job, world: int | None, fault: Callable[[], object], limit_s: float = LIMIT_S) -> tuple[float, int]:
    """Inject a fault and return the outage in seconds until a group of size `world` (None: any) trains, and the number of lost steps."""
    began = time.time()
    fault()
    made = job.await_steps(STEPS_AFTER, world, began, limit_s)
    last_before = max((each.time for each in made if each.time <= began), default=began)
    window = [each for each in made if each.time >= last_before]
    earlier, later = max(pairwise(window), key=lambda pair: pair[1].time - pair[0].time)
    reached = max(each.step for each in made if each.time <= earlier.time)
    return later.time - earlier.time, max(reached + 1 - later.step, 0)


def told(
    name: str, job: Job, world: int | None, fault: Callable[[], object], limit_s: float = LIMIT_S
) -> dict[str, float]:
    """Return the figures of a fault by name; they are infinite if the job made no step within the limit."""
    seconds: float
    lost: float
    try:
        seconds, lost = measured(job, world, fault, limit_s)
    except TimeoutError:
        seconds = lost = math.inf
    print(f"{name}: {seconds:.2f} s, {lost} steps lost", flush=True)
    return {f"{name}, s": seconds, f"{name}, steps lost": lost}


def one_round(start: Callable[[Nodes, str, str], Job], data: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, nodes() as cluster, ExitStack() as stack:
        for _ in range(2):
            cluster.add()
        cluster.await_all()
        job = start(cluster, data, folder)
        stack.callback(job.stop)

        def stop_worker() -> None:
            send_signal(worker_of(cluster, cluster.nodes[1]), signal.SIGSTOP)

        def fault(
            name: str, before: int, after: int | None, happens: Callable[[], object], limit_s: float = LIMIT_S
        ) -> None:
            job.await_steps(SETTLE_STEPS, before, time.time())
            figures.update(told(name, job, after, happens, limit_s))

        fault("worker killed", 2, None, lambda: send_signal(worker_of(cluster, cluster.nodes[1]), signal.SIGKILL))
        fault("notice", 2, 1, lambda: drain_and_kill(cluster, cluster.nodes[1]))
        fault("node added", 1, 2, cluster.add)
        fault("notice to the node of rank 0", 2, 1, lambda: drain_and_kill(cluster, cluster.nodes[0]))
        fault("node added again", 1, 2, cluster.add)
        fault("node killed", 2, 1, lambda: cluster.kill(cluster.nodes[1]))
        cluster.add()
        fault("hang", 2, None, stop_worker, HANG_LIMIT_S)
        figures.update(step_times(job.made()))
    return figures


def step_times(made: list[Made]) -> dict[str, float]:
    """Return the median seconds between two steps by number of workers, which are part of every outage."""
    times: dict[int, list[float]] = {}
    for earlier, later in pairwise(sorted(made, key=lambda each: each.time)):
        if earlier.world == later.world:
            times.setdefault(later.world, []).append(later.time - earlier.time)
    return {f"a step of {world}, s": statistics.median(each) for world, each in sorted(times.items())}


def drain_and_kill(cluster: Nodes, node: str, deadline_s: float = 20.0) -> None:
    """Give a node a notice, and kill it when the deadline is over."""
    cluster.drain(node, deadline_s)
    ender = threading.Timer(deadline_s, cluster.kill, [node])
    ender.daemon = True
    ender.start()


def worker_of(cluster: Nodes, node: str) -> psutil.Process:
    """Return the process that trains on a node."""
    return busiest(cluster.processes_of(node))


def busiest(processes: list[psutil.Process]) -> psutil.Process:
    """Return the Ray actor among these processes that has used the most CPU time; it is the one that trains."""

    def cpu(process: psutil.Process) -> float:
        times = process.cpu_times()
        return times.user + times.system

    return max((each for each in processes if "Worker" in " ".join(command_line(each))), key=cpu)


def command_line(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def torchrun_round(data: str) -> dict[str, float]:
    """Measure torchrun, which restarts all processes of a job when one is killed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.jsonl"
        script = str(HERE / "elastic_torchrun.py")
        options = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--max-restarts=100")
        command = [sys.executable, *options, script, f"{data}/train", str(out), folder]
        job = Job(command, {**os.environ, "OMP_NUM_THREADS": "1"}, lambda: lines(out))

        def workers() -> list[psutil.Process]:
            return [each for each in descendants(job.process) if script in command_line(each)]

        return killed_worker(job, workers)


def torchft_round(data: str) -> dict[str, float]:
    """Measure Ray Train's torchft mode, in which the surviving worker continues when the heartbeats of the killed one stop."""
    env = {"PYTHONPATH": os.pathsep.join([str(torchft_path()), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    with tempfile.TemporaryDirectory() as folder, nodes(head_cpus=2, env=env) as cluster:
        out = Path(folder) / "steps.jsonl"
        command = [sys.executable, str(HERE / "elastic_torchft.py"), f"{data}/train", str(out), folder]
        job = Job(command, {**client_env(cluster), **env}, lambda: lines(out))
        return killed_worker(job, lambda: [busiest(cluster.head_processes())])


def killed_worker(job: Job, workers: Callable[[], list[psutil.Process]]) -> dict[str, float]:
    try:
        job.await_steps(SETTLE_STEPS, 2, time.time())
        return told("worker killed", job, None, lambda: send_signal(workers()[-1], signal.SIGKILL))
    finally:
        job.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    contenders = {
        "undula": lambda data: one_round(undula_job, data),
        "undula-horovod": lambda data: one_round(partial(undula_job, engine="horovod"), data),
        "ray": lambda data: one_round(ray_job, data),
        "torchrun": torchrun_round,
        "torchft": torchft_round,
    }
    parser.add_argument("--contenders", nargs="*", default=list(contenders), choices=list(contenders))
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in options.contenders}
    with tempfile.TemporaryDirectory() as folder:
        stdlib_text().write(folder)
        try:
            for number in range(options.rounds):
                for name in options.contenders:
                    print(f"round {number + 1}, {name}", flush=True)
                    rounds[name].append(contenders[name](folder))
        finally:  # an hour's figures outlast a contender that does not come up
            for name, figures in rounds.items():
                if figures:
                    print_and_write(f"elastic-{name}", figures)


if __name__ == "__main__":
    main()
