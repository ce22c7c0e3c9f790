"""Cost of trackers per step: the main job with trackers, compared with the main job without.

    python -m tests.baselines.bench_trackers trackers.wandb.mode=offline
    python -m tests.baselines.bench_trackers trackers.mlflow.uri=http://HOST:5000

Interleaved rounds in fresh clusters; steps are timed by the script, in both alike. The workers do nothing for trackers, so what is measured
is the driver beside them on the same processors. Its processor time includes the start, which takes a few seconds once.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.baselines.bench_loop import differences
from tests.baselines.result import print_and_write
from undula.cluster.local import local_cluster
from undula.data.corpora import stdlib_text

HERE = Path(__file__).parent
JOBS = HERE.parents[1] / "jobs"


def timed(data: str, folder: str, name: str, steps: int, workers: int, trackers: Sequence[str]) -> tuple[float, float]:
    """Return the median duration of a step, and the processor time of the driver and its children, in seconds."""
    out = Path(folder) / f"{name}.json"
    command = [
        *(sys.executable, str(HERE / "cost_job.py"), "--config", str(JOBS / "language_model.yaml")),
        *(f"name={name}", f"runs={folder}", f"data.train={data}/train", "data.validation=null"),
        *(f"plan.max_steps={steps}", f"workers.min={workers}", f"workers.max={workers}"),
        *("checkpoint.every_steps=100000", *trackers),
    ]
    own = {"UNDULA_BENCH_OUT": str(out), "PYTHONPATH": os.pathsep.join([str(JOBS), os.environ.get("PYTHONPATH", "")])}
    with local_cluster(num_cpus=workers, env=own) as cluster:
        env = {**os.environ, **own, **cluster.env, "RAY_ADDRESS": cluster.address}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return statistics.median(differences(json.loads(out.read_text()))), used_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=240)
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
            added = (driver_on_s - driver_off_s) / options.steps
            rounds.append(
                {
                    "on, s": on_s,
                    "off, s": off_s,
                    "on / off": on_s / off_s,
                    "driver's processor time / step": added / off_s,
                }
            )
            print(f"round {number + 1}: " + ", ".join(f"{key} {value:.4f}" for key, value in rounds[-1].items()))
    print_and_write(f"trackers-{options.workers}", rounds)


if __name__ == "__main__":
    main()
