"""What a user would write without Undula: a torchrun DDP loop on the main job's model and data.

    torchrun --nproc-per-node 2 tests/baselines/ddp.py --data URL --steps 150 --out times.json

Same global batch, optimizer, clipping and schedule; rows from Parquet into memory, shuffled by DistributedSampler.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import pyarrow.dataset
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs"))
from gpt import GPT, GPTConfig


def rows(path: str) -> torch.Tensor:
    """[samples, context + 1] uint8"""
    column = pyarrow.dataset.dataset(path, format="parquet", exclude_invalid_files=True).to_table(["text"])["text"]
    values = column.combine_chunks()
    return torch.from_numpy(values.flatten().to_numpy().copy()).view(len(values), -1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(GPTConfig()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    dataset = TensorDataset(rows(options.data))
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=options.global_batch // world_size, sampler=sampler, drop_last=True)

    times = []
    for step, (batch,) in zip(range(options.steps), loader, strict=False):
        text = batch.long()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            warmup = min((step + 1) / 30, 1)
            group["lr"] = options.lr * warmup * (0.55 + 0.45 * math.cos(math.pi * step / options.steps))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.time())
    if rank == 0:
        options.out.write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
