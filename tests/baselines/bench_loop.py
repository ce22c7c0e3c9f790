"""Step throughput of the main job compared with a hand-written loop, with DDP or Horovod and the same model, data and cores.

    make bench

World size 2 by default. On 2 cores Ray's own processes then take their CPU from the training; with `--workers 1` a core is left for
them, and what the loop itself costs is seen.

With a GPU, both train on it, and `--workers 1` needs no second one.

Interleaved rounds, each in fresh processes; the first steps of a round do not count. Ours runs as users run it, in Ray, with its
ledger, live view and metrics. Neither validates or checkpoints within the measured steps.

Machines that are shared have slow phases of seconds. The share of slow steps on either side shows them: steps of at least 1.2 times the
duration that a tenth of the steps of that round stay below.
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
from undula.data.prepare.corpora import stdlib_text
from undula.state.ledger import read_ledger
from undula.storage import open_store

ROOT = Path(__file__).parents[2]
BASELINES: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {"torchrun DDP": ()},
    # Ours looks for gradients every 5 ms on CPUs, and Horovod by default every one: a user may choose that, too.
    "horovod": {"horovodrun": (), "horovodrun at 5 ms": ("--cycle-time-ms", "5")},
}
SKIPPED_STEPS = 20
SLOW = 1.2
"""Ratio of the duration of a slow step to that of a fast one."""


def ours(
    cluster: LocalCluster, data: str, runs: str, name: str, options: argparse.Namespace, extra: list[str]
) -> list[float]:
    """Return the duration of each measured step in seconds."""
    command = [
        *(sys.executable, str(ROOT / "jobs" / "language_model.py"), f"name={name}", f"runs={runs}"),
        *(
            f"data.train={data}/train",
            "data.validation=null",
            f"plan.max_steps={options.steps}",
            f"plan.global_batch={options.global_batch}",
        ),
        *(f"config.model.{name}={size}" for name, size in options.model.items()),
        *(f"workers.min={options.workers}", f"workers.max={options.workers}", "checkpoint.every_steps=100000", *extra),
    ]
    env = {**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address}
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return differences(read_ledger(open_store(f"{runs}/{name}")).steps["time"].to_pylist())


def theirs(flags: tuple[str, ...], data: str, folder: str, name: str, options: argparse.Namespace) -> list[float]:
    """Return the duration of each measured step in seconds."""
    out = Path(folder) / f"{name}.json"
    out.unlink(missing_ok=True)
    torchrun = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={options.workers}", "--standalone")
    horovodrun = (
        str(Path(sys.executable).parent / "horovodrun"),
        "-np",
        str(options.workers),
        "--gloo",
        *flags,
        sys.executable,
    )
    command = [
        *(torchrun if options.engine == "torch" else horovodrun),
        *(str(ROOT / "tests" / "baselines" / "plain_loop.py"), f"--engine={options.engine}", f"--data={data}/train"),
        *(f"--steps={options.steps}", f"--global-batch={options.global_batch}", f"--compute={options.compute}"),
        *(f"--model={json.dumps(options.model)}", f"--out={out}"),
    ]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    seconds: list[float] = json.loads(out.read_text())["seconds"]
    return seconds[SKIPPED_STEPS + 1 :]


def differences(times: list[float]) -> list[float]:
    counted = times[SKIPPED_STEPS:]
    return [later - earlier for earlier, later in itertools.pairwise(counted)]


def rate(name: str, durations: list[float], samples: int) -> dict[str, float]:
    """Return the samples per second of a round, and the share of its slow steps."""
    fast = statistics.quantiles(durations, n=10)[0]
    return {
        f"{name}, samples/s": samples / statistics.median(durations),
        f"{name}, slow steps": statistics.fmean(duration >= SLOW * fast for duration in durations),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--global-batch", type=int, default=32, help="samples per step; fewer where a step takes seconds"
    )
    parser.add_argument("--engine", choices=["torch", "horovod"], default="torch")
    parser.add_argument("--compute", choices=["fp32", "bf16"], default="fp32", help="bf16 compares with torch.amp")
    parser.add_argument("--model", type=json.loads, default={}, help='size of the model, as JSON: {"layers": 12}')
    parser.add_argument("overrides", nargs="*", help="overrides of the job")
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/data"
        stdlib_text().write(data)
        for number in range(options.rounds):
            # Ray is not there while the other runs: its daemons are part of what ours costs.
            name = f"round-{number}"
            overrides = [f"engine={options.engine}", f"precision.compute={options.compute}", *options.overrides]
            with local_cluster(num_cpus=2) as cluster:
                our = ours(cluster, data, f"{folder}/runs", name, options, overrides)
            figures = rate("undula", our, options.global_batch)
            for baseline, flags in BASELINES[options.engine].items():
                their = theirs(flags, data, folder, name, options)
                figures |= rate(baseline, their, options.global_batch)
                figures[f"ratio to {baseline}"] = statistics.median(their) / statistics.median(our)
            rounds.append(figures)
            print(
                f"round {number + 1}: " + ", ".join(f"{key} {value:.3f}" for key, value in rounds[-1].items()),
                flush=True,
            )
    name = "loop" if options.engine == "torch" else f"loop-{options.engine}"
    name = name if options.compute == "fp32" else f"{name}-{options.compute}"
    print_and_write(name if options.workers == 2 else f"{name}-{options.workers}", rounds)


if __name__ == "__main__":
    main()
