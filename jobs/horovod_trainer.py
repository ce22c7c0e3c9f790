"""A script of Ray Train's former HorovodTrainer: only its imports have changed, and num_workers has become a range.

undula data digits --out ~/undula/data/digits
ray job submit --address http://HEAD:8265 --runtime-env jobs/runtime_env.yaml -- python jobs/horovod_trainer.py
"""

import argparse
import json
import tempfile
from pathlib import Path

import horovod.torch as hvd
import ray.data
import ray.train
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig

from undula import ElasticHorovodTrainer as HorovodTrainer
from undula import HorovodConfig

UNDULA = Path.home() / "undula"


def train_loop_per_worker(config: dict) -> None:
    hvd.init()
    device = ray.train.torch.get_device()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"] * hvd.size(), momentum=0.9)

    begin = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"] + 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    rows = ray.train.get_dataset_shard("train")
    for epoch in range(begin, config["epochs"]):
        for batch in rows.iter_torch_batches(batch_size=config["batch_size"], device=device):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["image"].float() / 255), batch["label"])
            loss.backward()
            optimizer.step()
        metrics = {"epoch": epoch, "loss": hvd.allreduce(loss.detach()).item(), "workers": hvd.size()}
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, Path(folder) / "state.pt")
            ray.train.report(metrics, checkpoint=Checkpoint(folder) if hvd.rank() == 0 else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=f"{UNDULA}/data/digits/train", help="folder of Parquet")
    parser.add_argument("--storage", default=f"{UNDULA}/runs", help="folder or s3:// URL for checkpoints")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 2), metavar=("MIN", "MAX"))
    options = parser.parse_args()
    trainer = HorovodTrainer(
        train_loop_per_worker,
        train_loop_config={"lr": 0.01, "batch_size": 32, "epochs": options.epochs},
        horovod_config=HorovodConfig(),
        scaling_config=ScalingConfig(num_workers=tuple(options.workers)),
        run_config=RunConfig(
            name="horovod-trainer",
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=3),
        ),
        datasets={"train": ray.data.read_parquet(options.data)},
    )
    print(json.dumps(trainer.fit().metrics))


if __name__ == "__main__":
    main()
