"""A step of a sharded model beside one of FSDP2 by hand, which gathers as often and reduces with torch's reduce-scatter.

    python -m tests.baselines.bench_sharded

Both train copies of one model on two ranks in the same processes, in turns, with one thread each. FSDP2 by hand has torch's own
operations of sharded tensors, some of which Undula replaces in its processes. The figures are the CPU seconds of all ranks divided by those
of FSDP2, at the median step and at the cheapest step.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from jobs.gpt import GPT
from tests.baselines.bench_tree import MODELS, loss_of
from tests.baselines.result import print_and_write
from tests.engine_steps import placed, run_backward
from tests.ranks import on_ranks
from undula.parallel.spec import ShardingSpec

RANKS = 2


def step_costs(
    rank: int, world_size: int, model_name: str, virtual_workers: int, stage: int, steps: int
) -> list[list[float]]:
    """Return the CPU seconds of each step on this rank: ours, and those of FSDP2 by hand."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config, samples = MODELS[model_name]
    by_hand = GPT(config)
    module = copy.deepcopy(by_hand)
    shares = [samples // virtual_workers] * virtual_workers
    parts = torch.randint(256, (samples, config.context + 1)).split(shares)
    operations: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    torchs = dict(operations)
    engine = placed(module, rank, world_size, virtual_workers, sharding=ShardingSpec(stage))  # type: ignore[arg-type]
    ours = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine.prepare(module, ours)
    undulas = dict(operations)
    for block in by_hand.blocks:
        fully_shard(block, reshard_after_forward=stage == 3)
    fully_shard(by_hand, reshard_after_forward=False)
    theirs = torch.optim.AdamW(by_hand.parameters(), lr=1e-3, foreach=True)

    def with_the_tree() -> None:
        run_backward(engine, shares, lambda place: loss_of(module, parts[place]), max_norm=1.0)
        engine.step()

    def with_fsdp() -> None:
        own = parts[rank::world_size]
        for number, each in enumerate(own):
            if stage < 3:
                by_hand.set_reshard_after_backward(number == len(own) - 1)
            (loss_of(by_hand, each) / len(own)).backward()
        nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()

    ways: tuple[Callable[[], None], ...] = (with_the_tree, with_fsdp)
    taken: list[list[float]] = [[], []]
    for number in range(steps + 2):
        for way in (0, 1) if number % 2 else (1, 0):
            operations.clear()
            operations.update((undulas, torchs)[way])
            dist.barrier()
            began = time.process_time()
            ways[way]()
            dist.barrier()
            if number > 1:
                taken[way].append(time.process_time() - began)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds):
        figures: dict[str, float] = {}
        for stage in (2, 3):
            for virtual_workers in (2, 4):
                ranks = on_ranks(RANKS, step_costs, "0.9 M", virtual_workers, stage, options.steps)
                ours, theirs = ([sum(step) for step in zip(*of, strict=True)] for of in zip(*ranks, strict=True))
                for name, figure in (("median", statistics.median), ("least", min)):
                    figures[f"stage {stage}, V={virtual_workers}, {name}"] = figure(ours) / figure(theirs)
        print("\n".join(f"{name}: {value:.3f}" for name, value in figures.items()), flush=True)
        rounds.append(figures)
    print_and_write("sharded", rounds)


if __name__ == "__main__":
    main()
