"""Workers come while a job runs: the losses stay those of a run left alone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from integration_kit import Jobs, relative_difference

from undula.cluster.local import LocalCluster, local_cluster
from undula.state.ledger import read_ledger
from undula.storage import open_store

SETTINGS = (
    *("checkpoint.every_steps=20", "data.validation=null", "workers.resize_interval_s=1"),
    *("schedule.decay=constant", "schedule.base_lr=3e-4", "config.model.width=128", "config.model.layers=4"),
)


@contextmanager
def second_node(cluster: LocalCluster, num_cpus: int) -> Iterator[None]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            f"--address={cluster.address}",
            f"--num-cpus={num_cpus}",
        ],
        env={**os.environ, **cluster.env, "RAY_worker_niceness": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ray_command(cluster: LocalCluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
    env = {**os.environ, **cluster.env}
    return subprocess.run(command, env=env, check=True, text=True, capture_output=True).stdout


def drain_second_node(cluster: LocalCluster) -> None:
    nodes = json.loads(ray_command(cluster, "list", "nodes", f"--address={cluster.dashboard}", "--format=json"))
    (node_id,) = (node["node_id"] for node in nodes if not node["is_head_node"])
    reason = ("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=60")
    ray_command(cluster, "drain-node", f"--address={cluster.address}", f"--node-id={node_id}", *reason)


def test_a_node_that_comes_is_used_and_its_going_is_told_and_neither_changes_a_loss(
    session_jobs: Jobs, tmp_path: Path
) -> None:
    with local_cluster(num_cpus=1) as cluster:
        jobs = Jobs(cluster, session_jobs.text, str(tmp_path))
        process = jobs.start("grown", *SETTINGS, "plan.max_steps=3000", "workers.min=1", "workers.max=2")
        store = open_store(f"{tmp_path}/grown")

        def sizes() -> list[int]:
            return read_ledger(store).steps["world_size"].to_pylist() if store.exists("ledger") else []

        def wait_for(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 120
            while not condition():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.2)  # paces the looks

        wait_for(lambda: 1 in sizes())
        with second_node(cluster, num_cpus=1):
            wait_for(lambda: 2 in sizes())
            drain_second_node(cluster)
            wait_for(lambda: "notice" in read_ledger(store).events["kind"].to_pylist())
            process.terminate()
            process.communicate()
    ledger = read_ledger(store)
    (resize,) = (event for event in ledger.events.to_pylist() if event["kind"] == "resize")
    assert json.loads(resize["data"]) == {"from": 1, "to": 2}
    grown = ledger.steps
    assert grown["step"].to_pylist() == list(range(grown.num_rows))

    # With a constant rate a shorter run is the beginning of a longer one.
    alone = session_jobs.run("not-grown", *SETTINGS, f"plan.max_steps={grown.num_rows}", *session_jobs.workers(1))
    assert alone.status == 0, alone.err
    assert alone.column("sample_digest") == grown["sample_digest"].to_pylist()
    assert relative_difference(grown["loss"].to_pylist(), alone.column("loss")) < 1e-4
