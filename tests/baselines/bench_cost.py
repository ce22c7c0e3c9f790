"""Cost of elasticity per step: the main job with all features, compared with the main job without snapshots, ledger and policy.

    python -m tests.baselines.bench_cost

Without: Ray Train's own trainer, controller and worker group, no snapshots, and a telemetry that tells nothing. Interleaved rounds in
fresh clusters; steps are timed by the script, in both alike.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.baselines.bench_loop import differences
from tests.baselines.result import print_and_write
from undula.cluster.local import local_cluster
from undula.data.prepare.corpora import stdlib_text

HERE = Path(__file__).parent
JOBS = HERE.parents[1] / "jobs"
WITHOUT = {"UNDULA_BENCH_SILENT": "1"}


def step_seconds(data: str, folder: str, name: str, steps: int, workers: int, everything: bool) -> float:
    """Return the median duration of a step in seconds."""
    out = Path(folder) / f"{name}.json"
    command = [
        *(sys.executable, str(HERE / "cost_job.py"), "--config", str(JOBS / "language_model.yaml")),
        *(f"name={name}", f"runs={folder}", f"data.train={data}/train"),
        *(f"plan.max_steps={steps}", "data.validation=null", f"workers.min={workers}", f"workers.max={workers}"),
        *("checkpoint.every_steps=100000", *([] if everything else ["checkpoint.snapshot_every_steps=0"])),
        *([] if everything else ["--trainer", "ray"]),
    ]
    own = {"UNDULA_BENCH_OUT": str(out), "PYTHONPATH": str(JOBS), **({} if everything else WITHOUT)}
    with local_cluster(num_cpus=workers, env=own) as cluster:
        env = {**os.environ, **own, **cluster.env, "RAY_ADDRESS": cluster.address}
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return statistics.median(differences(json.loads(out.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        stdlib_text().write(f"{folder}/data")
        for number in range(options.rounds):
            order = (True, False) if number % 2 else (False, True)
            taken = {
                everything: step_seconds(
                    f"{folder}/data", folder, f"{number}-{everything}", options.steps, options.workers, everything
                )
                for everything in order
            }
            rounds.append({"on, s": taken[True], "off, s": taken[False], "on / off": taken[True] / taken[False]})
            print(
                f"round {number + 1}: " + ", ".join(f"{key} {value:.4f}" for key, value in rounds[-1].items()),
                flush=True,
            )
    print_and_write(f"cost-{options.workers}", rounds)


if __name__ == "__main__":
    main()
