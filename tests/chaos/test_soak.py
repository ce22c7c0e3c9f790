"""Soak test: after half an hour of added and lost nodes, memory and open files have not grown and no process is left over."""

import os
import statistics
import sys
import time
from pathlib import Path

import psutil
import pytest
from chaos_kit import long_lived
from small_text import ENDLESS, MODEL, PLAN, write_text

from undula.testing.chaos import start_driver
from undula.testing.nodes import nodes

MINUTES = float(os.environ.get("UNDULA_SOAK_MINUTES", "30"))
PERIOD_S = 30.0
SCRIPT = Path(__file__).parents[2] / "jobs" / "language_model.py"


def memory_and_files(process: psutil.Process) -> tuple[float, int]:
    """Return the resident memory in MiB and the number of open files of a process."""
    return process.memory_info().rss / 2**20, process.num_fds()


@pytest.mark.nightly
@pytest.mark.timeout(60 * MINUTES + 600)
def test_memory_files_and_processes_stay_flat(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    data = (f"data.train={text}/train", "data.validation=null", f"runs={tmp_path}/runs", "name=soak")
    settings = (
        *MODEL,
        *PLAN,
        *ENDLESS,
        "config.model.width=128",
        "workers.min=1",
        "workers.max=2",
        "workers.grow=always",
    )
    command = [sys.executable, str(SCRIPT), *data, *settings]
    samples: list[dict[str, tuple[float, int]]] = []
    counts: list[dict[str, int]] = []
    with nodes() as cluster:
        kept = cluster.add()
        cluster.await_all()
        driver = start_driver(command, cluster.cluster, lambda line: None)
        try:
            end = time.monotonic() + 60 * MINUTES
            while time.monotonic() < end:
                other = cluster.add()
                time.sleep(PERIOD_S)  # the test measures growth over time
                cluster.drain(other, deadline_s=10)
                time.sleep(PERIOD_S / 2)
                cluster.kill(other)
                time.sleep(PERIOD_S / 2)
                assert driver.process.poll() is None, driver.lines[-5:]
                named = long_lived(cluster, psutil.Process(driver.process.pid), kept)
                # The memory of Ray's raylets varies by a third from one second to the next.
                samples.append(
                    {name: memory_and_files(process) for name, process in named.items() if "raylet" not in name}
                )
                processes = len(cluster.processes_of(kept)) + len(cluster.head_processes())
                counts.append({"processes": processes, **cluster.count()})
                shown = {name: f"{mib:.0f} MiB, {files} files" for name, (mib, files) in samples[-1].items()}
                print({**shown, **counts[-1]}, flush=True)
        finally:
            driver.stop()
    third = len(samples) // 3
    for name in samples[0]:
        early = [sample[name] for sample in samples[third : 2 * third]]
        late = [sample[name] for sample in samples[2 * third :]]
        for place, what in ((0, "MiB"), (1, "files")):
            before, after = (statistics.median(each[place] for each in part) for part in (early, late))
            assert after <= 1.05 * before + 5, f"{name}: {before} -> {after} {what}"
    for what in counts[0]:
        early, late = (max(each[what] for each in part) for part in (counts[third : 2 * third], counts[2 * third :]))
        assert late <= early + 1, f"{what}: {early} -> {late}"
