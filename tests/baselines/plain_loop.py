"""Training loop that a user would write without Undula, over the main job's model and data, with DDP or Horovod.

    torchrun --nproc-per-node 2 tests/baselines/plain_loop.py --data URL --steps 150 --out times.json
    horovodrun -np 2 --gloo python tests/baselines/plain_loop.py --engine horovod --data URL --steps 150 --out times.json

Same global batch, optimizer, clipping and schedule; rows from Parquet into memory, shuffled by DistributedSampler. DDP uses a GPU for
each process if there are enough, over NCCL, and batches are then pinned. The file has the seconds of each step and the samples in a step,
as `undula bench scaling --against` reads them.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.dataset
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs"))
from gpt import GPT, GPTConfig


def adamw(model: torch.nn.Module, lr: float) -> torch.optim.AdamW:
    """Return the optimizer of the main job: biases and the gains of norms have no weight decay."""
    decaying = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


class Torch:
    """Engine with torch.distributed over NCCL or gloo."""

    def __init__(self, config: GPTConfig, lr: float):
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        has_gpus = torch.cuda.device_count() >= self.world_size
        self.device = torch.device("cuda", self.rank) if has_gpus else torch.device("cpu")
        if has_gpus:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if has_gpus else "gloo")
        torch.manual_seed(0)
        self.model = DistributedDataParallel(GPT(config).to(self.device))
        self.optimizer: Any = adamw(self.model, lr)

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def end(self) -> None:
        dist.destroy_process_group()


class Horovod:
    """Engine with Horovod, as its documentation shows for clipped gradients."""

    device = torch.device("cpu")

    def __init__(self, config: GPTConfig, lr: float):
        import horovod.torch as hvd

        hvd.init()
        self.rank, self.world_size = hvd.rank(), hvd.size()
        torch.manual_seed(0)
        self.model = GPT(config)
        optimizer = adamw(self.model, lr)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())
        self.end = hvd.shutdown

    def update(self) -> None:
        self.optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.optimizer.zero_grad()


def rows(path: str) -> torch.Tensor:
    """Return tokens as uint8 of shape [samples, context + 1]."""
    column = pyarrow.dataset.dataset(path, format="parquet", exclude_invalid_files=True).to_table(["text"])["text"]
    values = column.combine_chunks()
    return torch.from_numpy(values.flatten().to_numpy().copy()).view(len(values), -1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=["torch", "horovod"], default="torch")
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--compute", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--model", type=json.loads, default={}, help="size of the model, as JSON")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    engine: Any = {"torch": Torch, "horovod": Horovod}[options.engine](GPTConfig(**options.model), options.lr)
    device = engine.device
    dataset = TensorDataset(rows(options.data))
    sampler = DistributedSampler(dataset, engine.world_size, engine.rank, shuffle=True, drop_last=True)
    batch_size = options.global_batch // engine.world_size
    loader = DataLoader(
        dataset, batch_size=batch_size, sampler=sampler, drop_last=True, pin_memory=device.type == "cuda"
    )

    is_mixed = options.compute == "bf16"
    times = [time.perf_counter()]
    for step, (batch,) in zip(range(options.steps), loader, strict=False):
        text = batch.to(device, non_blocking=True).long()
        with torch.autocast(device.type, torch.bfloat16) if is_mixed else nullcontext():
            loss = F.cross_entropy(engine.model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        for group in engine.optimizer.param_groups:
            warmup = min((step + 1) / 30, 1)
            group["lr"] = options.lr * warmup * (0.55 + 0.45 * math.cos(math.pi * step / options.steps))
        engine.update()
        loss.item()
        times.append(time.perf_counter())
    if engine.rank == 0:
        seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
        options.out.write_text(json.dumps({"seconds": seconds, "samples": batch_size * engine.world_size}))
    engine.end()


if __name__ == "__main__":
    main()
