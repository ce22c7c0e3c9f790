"""Trials per hour of a packed study compared with Ray Tune alone: `python -m tests.baselines.bench_study`.

Ray Tune alone is a grid with the same resources, which keeps its processes from one trial to the next as the study does. Its trials are
the same train function, `tune-same`, or what one would write by hand, `tune-plain`: plain torch over the same samples, read from Parquet
into memory at its start, without ledger and checkpoints. All run in turn on one local cluster, with as many trials at once as there are
cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.baselines.result import print_and_write
from undula.cluster.local import LocalCluster, local_cluster
from undula.driver.record import job_of

ROOT = Path(__file__).parents[2]
RATES = [0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.24]
BATCHES = [32, 128]
VALIDATED = 256
WIDTH = 4
MICRO_BATCH = 16
CONTENDERS = ("undula", "tune-same", "tune-plain")
Train = Callable[[dict[str, Any]], None]


def plain(data: str) -> Train:
    """Train a trial as a user would write it by hand."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray
    import torch
    import torch.nn.functional as F
    from ray import tune

    import resnet

    ray.cloudpickle.register_pickle_by_value(resnet)

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

        samples, measurements = config["samples"], config["measurements"]
        steps = samples // config["batch"]
        epoch, order = 0, torch.randperm(len(images))
        measure(0)
        for step in range(steps):
            places = torch.arange(step * config["batch"], (step + 1) * config["batch"])
            if int(places[-1]) // len(images) > epoch:
                epoch, order = epoch + 1, torch.randperm(len(images))
            for part in order[places % len(images)].split(MICRO_BATCH):
                scores = logits(images[part])
                accuracy = (scores.argmax(1) == labels[part]).float().mean().item()  # as the job's function has it
                loss = F.cross_entropy(scores, labels[part])
                (loss * len(part) / config["batch"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) * measurements // steps > step * measurements // steps:
                measure(step + 1)
        assert accuracy <= 1

    return train


def same(study: Path, folder: Path) -> Train:
    """Train a trial with the study's own train function, including its ledger and checkpoints."""
    import ray
    from ray import tune

    import image_classifier
    import resnet
    from undula.state.events import ValidationEvent
    from undula.study.job import Study
    from undula.study.load import load_study
    from undula.study.trials import Trial
    from undula.telemetry.messages import Message
    from undula.train.single_process import SingleProcess

    for module in (resnet, image_classifier):
        ray.cloudpickle.register_pickle_by_value(module)
    whole = Study(load_study(study, [f"overrides.runs={folder}"], image_classifier.Config))
    trials = [(batch, lr) for batch in BATCHES for lr in RATES]
    # As bytes, as Tune's own process would unpickle the script's classes else.
    jobs = {
        each: ray.cloudpickle.dumps(job_of(whole.job(Trial(each[0], each[1], "none", 0, "own", 0)), ""))
        for each in trials
    }

    def report(message: Message) -> None:
        if isinstance(message, ValidationEvent):
            tune.report({"loss": message.loss, "step": message.step})

    def train(config: dict[str, Any]) -> None:
        SingleProcess(image_classifier.train, ray.cloudpickle.loads(jobs[config["batch"], config["lr"]]), report)()

    return train


def tune_alone(train: Train, folder: Path, samples: int) -> None:
    """Run Ray Tune alone; call this in a separate process."""
    import ray
    from ray import tune

    ray.init(log_to_driver=False)
    results = tune.Tuner(
        tune.with_resources(train, {"CPU": 1}),
        param_space={
            "lr": tune.grid_search(RATES),
            "batch": tune.grid_search(BATCHES),
            "samples": samples,
            "measurements": measurements_of(samples),
        },
        tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=True),
        run_config=tune.RunConfig(name="alone", storage_path=str(folder), verbose=0),
    ).fit()
    assert not results.errors
    assert len(results) == len(RATES) * len(BATCHES)


def measurements_of(samples: int) -> int:
    """Return the number of measurements in a trial, at the same interval in samples as in jobs/lr_study_sgd.yaml."""
    return samples // 512


def study_file(data: str, folder: Path, name: str, samples: int) -> Path:
    """Run the same trials as a study."""
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
        "samples": samples,
        "measurements": measurements_of(samples),
        "packed": 1,
        "overrides": overrides,
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(study))
    return file


def timed(command: list[str], cluster: LocalCluster) -> float:
    """Return the duration of a command in seconds."""
    env = {**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address}
    began = time.monotonic()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16_384, help="of a trial; jobs/lr_study_sgd.yaml has as many")
    parser.add_argument("--data", default=str(Path("~/undula/data/digits").expanduser()))
    parser.add_argument("--alone", choices=CONTENDERS[1:], help=argparse.SUPPRESS)
    parser.add_argument("--study", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench" / "study")
    options = parser.parse_args()
    if options.alone:
        sys.path.insert(0, str(ROOT / "jobs"))
        train = plain(options.data) if options.alone == "tune-plain" else same(options.study, options.folder)
        tune_alone(train, options.folder, options.samples)
        return
    subprocess.run(
        [sys.executable, "-m", "undula.cli", "data", "digits", "--out", options.data, "--if-missing"], check=True
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    rounds: list[dict[str, float]] = []
    with local_cluster(os.cpu_count() or 1) as cluster:
        for number in range(options.rounds):
            study = study_file(options.data, options.folder, f"round-{number}", options.samples)
            per_hour = {}
            for place in range(len(CONTENDERS)):
                name = CONTENDERS[(number + place) % len(CONTENDERS)]
                with tempfile.TemporaryDirectory() as folder:
                    seconds = timed(command_of(name, study, folder, options), cluster)
                per_hour[name] = 3600 * len(RATES) * len(BATCHES) / seconds
                print(f"round {number + 1}, {name}: {seconds:.1f} s", flush=True)
            others = {f"undula over {name}": per_hour["undula"] / per_hour[name] for name in CONTENDERS[1:]}
            rounds.append({**{f"{name}, trials an hour": rate for name, rate in per_hour.items()}, **others})
    print_and_write(f"study-{options.samples}", rounds)


def command_of(contender: str, study: Path, folder: str, options: argparse.Namespace) -> list[str]:
    if contender == "undula":
        return [sys.executable, str(ROOT / "jobs" / "image_classifier.py"), "--study", str(study), "--fresh"]
    module = ["-m", "tests.baselines.bench_study", "--data", options.data, "--samples", str(options.samples)]
    return [sys.executable, *module, "--alone", contender, "--study", str(study), "--folder", folder]


if __name__ == "__main__":
    main()
