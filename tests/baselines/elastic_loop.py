"""Training loop of the elastic baselines: the model and batch of the main job, with a checkpoint every 10 steps and a line per step."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.baselines.plain_loop import adamw

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs"))
from gpt import GPT, GPTConfig

CHECKPOINT_EVERY = 10
GLOBAL_BATCH = 32


def write_step(out: Path, step: int, world_size: int) -> None:
    """Append a line {"step", "time", "world"} with `time` in seconds since the epoch."""
    with out.open("a") as file:
        file.write(json.dumps({"step": step, "time": time.time(), "world": world_size}) + "\n")


def loop(
    rows: Tensor,
    out: Path,
    wrap: Callable[[nn.Module], nn.Module],
    load: Callable[[], Any],
    save: Callable[[Any], None],
) -> None:
    """Train until the process is ended. Rank 0 writes a line for each step to `out`.

    Args:
        rows: [samples, context + 1] uint8.
        out: File of JSON lines.
        wrap: Places the model and makes it data parallel.
        load: The newest checkpoint, None where there is none.
        save: Keeps one; every rank calls it.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = wrap(GPT(GPTConfig()))
    bare = getattr(model, "module", model)
    optimizer = adamw(model, 3e-4)
    step = 0
    if (state := load()) is not None:
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        chosen = torch.randint(len(rows), (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(step))
        text = rows[chosen[rank::world_size]].long()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        if rank == 0:
            write_step(out, step, world_size)
        step += 1
        if step % CHECKPOINT_EVERY == 0:
            save({"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
