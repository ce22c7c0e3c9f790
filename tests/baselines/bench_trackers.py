"""Cost of trackers per step: the main job with trackers, compared with the main job without.

    python -m tests.baselines.bench_trackers trackers.wandb.mode=offline
    python -m tests.baselines.bench_trackers trackers.mlflow.uri=http://HOST:5000

Interleaved rounds in fresh clusters; steps are timed by the script, in both alike. The workers do nothing for trackers, so what can slow
them is the driver beside them on the same processors. The processor time that it and its children use while steps are made is measured
too, because it is far smaller than the differences between two runs: the steps are at most that much slower. A server is not included.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.baselines.bench_loop import SKIPPED_STEPS, differences
from tests.baselines.result import print_and_write
from undula.cluster.local import local_cluster
from undula.data.prepare.corpora import stdlib_text

HERE = Path(__file__).parent
JOBS = HERE.parents[1] / "jobs"
STEP = re.compile(r"step +(\d+)/")


def timed(data: str, folder: str, name: str, steps: int, workers: int, trackers: Sequence[str]) -> tuple[float, float]:
    """Return the median duration of a step, and the processor time per step of the driver and its children, in seconds."""
    out = Path(folder) / f"{name}.json"
    command = [
        *(sys.executable, str(HERE / "cost_job.py"), "--config", str(JOBS / "language_model.yaml")),
        *(f"name={name}", f"runs={folder}", f"data.train={data}/train", "data.validation=null"),
        *(f"plan.max_steps={steps}", f"workers.min={workers}", f"workers.max={workers}"),
        *("checkpoint.every_steps=100000", *trackers),
    ]
    own = {"UNDULA_BENCH_OUT": str(out), "PYTHONPATH": os.pathsep.join([str(JOBS), os.environ.get("PYTHONPATH", "")])}
    used: list[tuple[int, float]] = []
    with local_cluster(num_cpus=workers, env=own) as cluster:
        env = {**os.environ, **own, **cluster.env, "RAY_ADDRESS": cluster.address, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            for line in driver.stdout:
                if (match := STEP.match(line)) and int(match[1]) >= SKIPPED_STEPS:
                    used.append((int(match[1]), processor_s(driver.pid)))
        assert driver.returncode == 0
    (first, before), *_, (last, after) = used
    return statistics.median(differences(json.loads(out.read_text()))), (after - before) / (last - first)


def processor_s(pid: int) -> float:
    """Return the processor time of a process and its children so far, in seconds."""
    process, seconds = psutil.Process(pid), 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            seconds += times.user + times.system
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("trackers", nargs="+", metavar="trackers.NAME.KEY=VALUE")
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/data"
        stdlib_text().write(data)
        for number in range(options.rounds):
            found = {}
            for is_on in (True, False) if number % 2 else (False, True):
                trackers = options.trackers if is_on else ()
                found[is_on] = timed(data, folder, f"{number}-{is_on}", options.steps, options.workers, trackers)
            (on_s, driver_on_s), (off_s, driver_off_s) = found[True], found[False]
            added = driver_on_s - driver_off_s
            rounds.append(
                {
                    "on, s": on_s,
                    "off, s": off_s,
                    "on / off": on_s / off_s,
                    "added processor time / step": added / off_s,
                }
            )
            print(f"round {number + 1}: " + ", ".join(f"{key} {value:.4f}" for key, value in rounds[-1].items()))
    print_and_write(f"trackers-{options.workers}", rounds)


if __name__ == "__main__":
    main()
