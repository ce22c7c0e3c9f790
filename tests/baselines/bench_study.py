"""Trials per hour of a packed study beside Ray Tune alone, which runs the same train function: `python -m tests.baselines.bench_study`.

Ray Tune alone is what one would write by hand: a function that trains, measures and reports, a grid, the same resources. Its loop is
plain torch over the same samples, read from Parquet into memory at its start; it keeps no ledger and no checkpoints. Both run in turn
on one local cluster, with as many trials at once as there are cores.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from undula.cluster.local import LocalCluster, local_cluster

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "bench" / "study.json"
RATES = [0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.24]
BATCHES = [32, 128]
SAMPLES = 4_096
MEASUREMENTS = 8
VALIDATED = 256
WIDTH = 4
MICRO_BATCH = 16


def tune_alone(data: str, folder: str, reuses: bool) -> None:
    """The hand-written study; called in a process of its own."""
    sys.path.insert(0, str(ROOT / "jobs"))
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray
    import torch
    import torch.nn.functional as F
    from ray import tune

    import resnet

    def read(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        table = pa.concat_tables([pq.read_table(file) for file in sorted(Path(data, split).rglob("*.parquet"))])
        images = torch.tensor(table["image"].combine_chunks().flatten().to_numpy()).reshape(-1, 1, 8, 8)
        return images, torch.tensor(table["label"].to_numpy())

    def train(config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        images, labels = read("train")
        held_images, held_labels = (part[:VALIDATED] for part in read("validation"))
        model = resnet.ResNet18(resnet.ResNetConfig(channels=1, classes=10, width=WIDTH))
        kept = [each for each in model.parameters() if each.ndim > 1]
        free = [each for each in model.parameters() if each.ndim <= 1]
        groups = [{"params": kept, "weight_decay": 5e-4}, {"params": free, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=config["lr"], momentum=0.9, nesterov=True)

        def logits(batch: torch.Tensor) -> torch.Tensor:
            return model(batch.float() / 127.5 - 1)

        def measure(step: int) -> None:
            model.eval()
            with torch.no_grad():
                parts = zip(held_images.split(MICRO_BATCH), held_labels.split(MICRO_BATCH), strict=True)
                losses = [F.cross_entropy(logits(x), y, reduction="sum").item() for x, y in parts]
            model.train()
            tune.report({"loss": sum(losses) / VALIDATED, "step": step})

        steps = SAMPLES // config["batch"]
        order = torch.randperm(len(images))
        measure(0)
        for step in range(steps):
            first = step * config["batch"]
            rows = order[torch.arange(first, first + config["batch"]) % len(images)]
            for part in rows.split(MICRO_BATCH):
                loss = F.cross_entropy(logits(images[part]), labels[part])
                (loss * len(part) / len(rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) * MEASUREMENTS // steps > step * MEASUREMENTS // steps:
                measure(step + 1)

    ray.init(log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(resnet)
    results = tune.Tuner(
        tune.with_resources(train, {"CPU": 1}),
        param_space={"lr": tune.grid_search(RATES), "batch": tune.grid_search(BATCHES)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=reuses),
        run_config=tune.RunConfig(name="alone", storage_path=folder, verbose=0),
    ).fit()
    assert not results.errors
    assert len(results) == len(RATES) * len(BATCHES)


def study_file(data: str, folder: Path, name: str) -> Path:
    """The same as a study."""
    overrides = {
        "runs": str(folder),
        "data.train": f"{data}/train",
        "data.validation": f"{data}/validation",
        "plan.virtual_workers": 1,
        "plan.micro_batch": MICRO_BATCH,
        "plan.last_step": "wrap",
        "schedule.decay": "constant",
        "schedule.warmup_samples": 0,
        "validation.samples": VALIDATED,
        "config.model.width": WIDTH,
    }
    study = {
        "name": name,
        "job": str(ROOT / "jobs" / "image_classifier.yaml"),
        "batches": BATCHES,
        "base_lrs": RATES,
        "samples": SAMPLES,
        "measurements": MEASUREMENTS,
        "packed": 1,
        "overrides": overrides,
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(study))
    return file


def timed(command: list[str], cluster: LocalCluster) -> float:
    """Seconds of a command."""
    env = {**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address}
    began = time.monotonic()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", default=str(Path("~/undula/data/digits").expanduser()))
    parser.add_argument("--alone", choices=["new", "reused"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench" / "study")
    options = parser.parse_args()
    if options.alone:
        tune_alone(options.data, str(options.folder), options.alone == "reused")
        return
    subprocess.run(
        [sys.executable, "-m", "undula.cli", "data", "digits", "--out", options.data, "--if-missing"], check=True
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    trials = len(RATES) * len(BATCHES)
    seconds: dict[str, list[float]] = {"undula": [], "new": [], "reused": []}
    with local_cluster(os.cpu_count() or 1) as cluster:
        for number in range(options.rounds):
            file = study_file(options.data, options.folder, f"round-{number}")
            script = str(ROOT / "jobs" / "image_classifier.py")
            seconds["undula"].append(timed([sys.executable, script, "--study", str(file), "--fresh"], cluster))
            for kind in ("new", "reused"):
                folder = options.folder / f"tune-{kind}-{number}"
                command = [sys.executable, "-m", "tests.baselines.bench_study", "--data", options.data]
                seconds[kind].append(timed([*command, "--alone", kind, "--folder", str(folder)], cluster))
            print({kind: round(found[-1], 1) for kind, found in seconds.items()}, flush=True)
    per_hour = {kind: 3600 * trials / median(found) for kind, found in seconds.items()}
    ratios = {kind: per_hour["undula"] / per_hour[kind] for kind in ("new", "reused")}
    OUT.write_text(json.dumps({"seconds": seconds, "trials_per_hour": per_hour, "ratios": ratios}, indent=1))
    print(f"{'':>28}{'trials an hour':>16}{'undula over it':>16}")
    print(f"{'undula study':>28}{per_hour['undula']:>16,.0f}")
    print(f"{'ray tune':>28}{per_hour['new']:>16,.0f}{ratios['new']:>16.3f}")
    print(f"{'ray tune, reuse_actors':>28}{per_hour['reused']:>16,.0f}{ratios['reused']:>16.3f}")


if __name__ == "__main__":
    main()
