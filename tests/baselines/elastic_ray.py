"""Elastic training as Ray's documentation recommends it: a TorchTrainer with (min, max) workers and a checkpoint every 10 steps.

python tests/baselines/elastic_ray.py DATA OUT FOLDER
"""

import sys
import tempfile
from pathlib import Path

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict[str, str]) -> None:
    sys.path.insert(0, config["root"])
    from tests.baselines.elastic_loop import loop
    from tests.baselines.plain_loop import rows

    def load():  # type: ignore[no-untyped-def]
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as folder:
            return torch.load(f"{folder}/state.pt")

    def save(state):  # type: ignore[no-untyped-def]
        with tempfile.TemporaryDirectory() as folder:
            is_first = ray.train.get_context().get_world_rank() == 0
            if is_first:
                torch.save(state, f"{folder}/state.pt")
            ray.train.report({}, checkpoint=Checkpoint.from_directory(folder) if is_first else None)

    loop(rows(config["data"]), Path(config["out"]), ray.train.torch.prepare_model, load, save)


def main() -> None:
    data, out, folder = sys.argv[1:]
    TorchTrainer(
        train,
        train_loop_config={"data": data, "out": out, "root": str(Path(__file__).parents[2])},
        scaling_config=ScalingConfig(
            num_workers=(1, 2), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=1
        ),
        run_config=RunConfig(name="ray", storage_path=folder, failure_config=FailureConfig(max_failures=-1)),
    ).fit()


if __name__ == "__main__":
    main()
