"""Step throughput of the main job's loop beside a hand-written torchrun DDP loop: same model, data and cores, world size 2.

    make bench

Interleaved rounds, each in fresh processes; the first steps of a round do not count. Ours runs as users run it, in Ray, with its
ledger, live view and metrics. Neither validates or checkpoints within the measured steps.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.baselines.result import print_and_write
from undula.cluster.local import LocalCluster, local_cluster
from undula.data.corpora import stdlib_text
from undula.state.ledger import read_ledger
from undula.storage import open_store

ROOT = Path(__file__).parents[2]
SKIPPED_STEPS = 20
GLOBAL_BATCH = 32


def ours(cluster: LocalCluster, data: str, runs: str, name: str, steps: int, extra: list[str]) -> list[float]:
    """Seconds of each counted step."""
    command = [
        *(sys.executable, str(ROOT / "jobs" / "language_model.py"), f"name={name}", f"runs={runs}"),
        *(
            f"data.train={data}/train",
            "data.validation=null",
            f"plan.max_steps={steps}",
            f"plan.global_batch={GLOBAL_BATCH}",
        ),
        *("workers.min=2", "workers.max=2", "checkpoint.every_steps=100000", *extra),
    ]
    env = {**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address}
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return differences(read_ledger(open_store(f"{runs}/{name}")).steps["time"].to_pylist())


def theirs(data: str, folder: str, name: str, steps: int) -> list[float]:
    """Seconds of each counted step."""
    out = Path(folder) / f"{name}.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
        *(str(ROOT / "tests" / "baselines" / "ddp.py"), f"--data={data}/train", f"--steps={steps}", f"--out={out}"),
        f"--global-batch={GLOBAL_BATCH}",
    ]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    return differences(json.loads(out.read_text()))


def differences(times: list[float]) -> list[float]:
    counted = times[SKIPPED_STEPS:]
    return [later - earlier for earlier, later in itertools.pairwise(counted)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("overrides", nargs="*", help="overrides of the job")
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/data"
        stdlib_text().write(data)
        for number in range(options.rounds):
            # Ray is not there while the other runs: its daemons are part of what ours costs.
            with local_cluster(num_cpus=2) as cluster:
                our = ours(cluster, data, f"{folder}/runs", f"round-{number}", options.steps, options.overrides)
            their = theirs(data, folder, f"round-{number}", options.steps)
            rounds.append(
                {
                    "undula, samples/s": GLOBAL_BATCH / statistics.median(our),
                    "torchrun DDP, samples/s": GLOBAL_BATCH / statistics.median(their),
                    "ratio": statistics.median(their) / statistics.median(our),
                }
            )
            print(
                f"round {number + 1}: " + ", ".join(f"{key} {value:.3f}" for key, value in rounds[-1].items()),
                flush=True,
            )
    print_and_write("loop", rounds)


if __name__ == "__main__":
    main()
