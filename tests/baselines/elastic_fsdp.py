"""Elastic training of a sharded model as a user of Ray Train writes it: FSDP2 by hand, and a sharded checkpoint every 10 steps.

    python tests/baselines/elastic_fsdp.py DATA OUT FOLDER MODEL

MODEL is the size of the model as JSON. Rank 0 writes a line for each step to OUT, and rank R the id of its node to `rank-R` beside it.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

CHECKPOINT_EVERY = 10
GLOBAL_BATCH = 2


class TrainState(Stateful):
    """What a checkpoint has, as torch.distributed.checkpoint saves and loads it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def train(config: dict[str, Any]) -> None:
    sys.path.insert(0, config["root"])
    from jobs.gpt import GPT, GPTConfig
    from tests.baselines.elastic_loop import write_step
    from tests.baselines.plain_loop import adamw, rows

    rank, world_size, out = dist.get_rank(), dist.get_world_size(), Path(config["out"])
    out.with_name(f"rank-{rank}").write_text(ray.get_runtime_context().get_node_id())
    data = rows(config["data"])
    torch.manual_seed(0)
    model = GPT(GPTConfig(**config["model"]))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    state = TrainState(model, adamw(model, 3e-4))
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            dcp.load({"state": state}, checkpoint_id=folder)
    while True:
        chosen = torch.randint(len(data), (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(state.step))
        text = data[chosen[rank::world_size]].long()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        state.optimizer.step()
        state.optimizer.zero_grad()
        if rank == 0:
            write_step(out, state.step, world_size)
        state.step += 1
        if state.step % CHECKPOINT_EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:  # each rank's shards; Ray Train merges the folders
                dcp.save({"state": state}, checkpoint_id=folder)
                ray.train.report({}, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    data, out, folder, model = sys.argv[1:]
    TorchTrainer(
        train,
        train_loop_config={
            "data": data, "out": out, "model": json.loads(model), "root": str(Path(__file__).parents[2])
        },
        scaling_config=ScalingConfig(
            num_workers=(1, 2), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=1
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()  # fmt: skip


if __name__ == "__main__":
    main()
