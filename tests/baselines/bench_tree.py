"""A step along the tree beside a plain loop at one rank, and beside torch's DistributedDataParallel at two.

    python -m tests.baselines.bench_tree

All train copies of one model in the same processes, in turns, with one thread each. Torch gets a rank's samples as one batch, and as the
micro-batches of the virtual workers, whose gradients it accumulates. The figures are the cost of the tree divided by that of either: in CPU
seconds of all ranks and in wall time, each at the median step and at the cheapest step.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.gpt import GPT, GPTConfig
from tests.baselines.result import print_and_write
from tests.engine_steps import placed, run_backward
from tests.ranks import on_ranks
from undula.plan.tree import assign

MODELS = {
    "0.9 M": (GPTConfig(), 16),
    "10 M": (GPTConfig(layers=6, width=384, heads=6), 16),
}
"""Models, and the samples in a step."""


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def step_costs(rank: int, world_size: int, model_name: str, virtual_workers: int, steps: int) -> dict[str, Any]:
    """Return for each way the CPU seconds and the wall seconds of each step on this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config, samples = MODELS[model_name]
    plain = GPT(config)
    text = torch.randint(256, (samples, config.context + 1))
    shares = [samples // virtual_workers] * virtual_workers
    parts = text.split(shares)
    tree = copy.deepcopy(plain)
    engine = placed(tree, rank, world_size, virtual_workers)
    ours = torch.optim.AdamW(tree.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    wrapped = nn.parallel.DistributedDataParallel(plain) if world_size > 1 else plain

    def with_the_tree() -> None:
        run_backward(engine, shares, lambda place: loss_of(tree, parts[place]), max_norm=1.0)
        ours.step()
        ours.zero_grad()

    def with_torch(own: Sequence[Tensor]) -> None:
        for number, each in enumerate(own):
            is_last = number == len(own) - 1
            with nullcontext() if is_last or world_size == 1 else wrapped.no_sync():
                (loss_of(wrapped, each) / len(own)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()

    ways: dict[str, Callable[[], None]] = {
        "tree": with_the_tree,
        "its micro-batches": partial(with_torch, [parts[place] for place in assign(virtual_workers, world_size)[rank]]),
        "one batch a rank": partial(with_torch, [text.chunk(world_size)[rank]]),
    }
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(steps + 2):
        for way in sorted(ways, reverse=bool(number % 2)):
            if world_size > 1:
                dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            ways[way]()
            if world_size > 1:
                dist.barrier()
            if number > 1:
                taken[way].append((time.process_time() - cpu, time.perf_counter() - wall))
    return taken


def ratios(model: str, virtual_workers: int, world_size: int, steps: int) -> dict[str, float]:
    ranks = on_ranks(world_size, step_costs, model, virtual_workers, steps)
    cpu = {}
    for way in ranks[0]:
        of_ranks = [[seconds for seconds, _ in each[way]] for each in ranks]
        cpu[way] = [sum(step) for step in zip(*of_ranks, strict=True)]
    wall = {way: [w for _, w in ranks[0][way]] for way in ranks[0]}
    return {
        f"{model}, V={virtual_workers}, W={world_size}, {way}: {kind}, {name}": figure(of["tree"]) / figure(of[way])
        for way in ranks[0]
        if way != "tree"
        for kind, of in (("CPU", cpu), ("wall", wall))
        for name, figure in (("median", statistics.median), ("least", min))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--virtual-workers", type=int, action="append")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds):
        figures: dict[str, float] = {}
        for model in options.model or MODELS:
            for virtual_workers in options.virtual_workers or (4, 8):
                for world_size in options.ranks or (1, 2):
                    found = ratios(model, virtual_workers, world_size, options.steps)
                    print("\n".join(f"{name}: {value:.3f}" for name, value in found.items()), flush=True)
                    figures |= found
        rounds.append(figures)
    print_and_write("tree", rounds)


if __name__ == "__main__":
    main()
