"""Trains on a table as Ray Train's examples do: Ray Data with a preprocessor, reported metrics, a checkpoint of each epoch."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import ray
import ray.train
import torch
from ray.data.preprocessors import StandardScaler
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

FEATURES = ("age", "income", "debt", "visits")


def make_table(rows):
    generator = np.random.default_rng(0)
    table = pd.DataFrame(generator.normal(size=(rows, 4)) * (10, 2e4, 5e3, 3) + (40, 5e4, 1e4, 6), columns=FEATURES)
    table["target"] = (table.income - 3 * table.debt + 800 * (table.age - 40) > 2e4).astype("float32")
    return table


def train_loop_per_worker(config):
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    loss_fn = nn.BCEWithLogitsLoss()
    train_data, valid_data = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("valid")

    def batches(shard):
        for batch in shard.iter_torch_batches(batch_size=config["batch_size"], dtypes=torch.float32):
            yield torch.stack([batch[name] for name in FEATURES], dim=1), batch["target"]

    for epoch in range(config["epochs"]):
        model.train()
        for inputs, target in batches(train_data):
            loss = loss_fn(model(inputs).squeeze(1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        correct = count = 0
        with torch.no_grad():
            for inputs, target in batches(valid_data):
                correct += ((model(inputs).squeeze(1) > 0) == (target > 0.5)).sum().item()
                count += len(target)
        metrics = {"epoch": epoch, "loss": loss.item(), "accuracy": correct / count}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), Path(folder, "model.pt"))
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--num-workers", type=int, default=2)
    args = parser.parse_args()
    ray.init("local", num_cpus=4)
    train_data, valid_data = ray.data.from_pandas(make_table(160)).train_test_split(test_size=0.2)
    preprocessor = StandardScaler(columns=list(FEATURES)).fit(train_data)
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"lr": 1e-2, "batch_size": 8, "epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.num_workers),
        datasets={"train": preprocessor.transform(train_data), "valid": preprocessor.transform(valid_data)},
        run_config=RunConfig(
            name="tabular",
            storage_path=str(Path("results").resolve()),
            checkpoint_config=CheckpointConfig(1, checkpoint_score_attribute="accuracy"),
        ),
    )
    result = trainer.fit()
    print(result.metrics)
    print(result.best_checkpoints)


if __name__ == "__main__":
    main()
