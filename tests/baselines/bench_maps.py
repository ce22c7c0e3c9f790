"""Loading of a map-style dataset of images with augmentation through loader processes, beside a plain DataLoader in the same run.

    python -m tests.baselines.bench_maps --rounds 5

Both load the same samples in batches of the same size, in the same number of processes, and nothing trains. A round measures one after
the other, in turn first. `ratio` is the rate of a run divided by that of the plain DataLoader.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.baselines.result import print_and_write
from undula.data.script.items import Items
from undula.data.script.loader_processes import Loader
from undula.data.script.reader import ScriptReader
from undula.plan.plan import Plan, PlanSpec

SIDE = 96
"""Height and width of an augmented image in pixels."""


class Images(Dataset[tuple[Tensor, int]]):
    """Images of noise, which are cropped, resized, flipped and dimmed at random."""

    def __init__(self, rows: int):
        self._rows = rows
        self._pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (64, 3, 256, 256), dtype=np.uint8))

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self._pixels[index % 64]
        size = int(torch.randint(128, 256, ()))
        top, left = torch.randint(0, 257 - size, (2,)).tolist()
        crop = image[:, top : top + size, left : left + size].float() / 255
        resized = F.interpolate(crop[None], size=(SIDE, SIDE), mode="bilinear", antialias=True)[0]
        if torch.rand(()) < 0.5:
            resized = resized.flip(2)
        return (resized * (0.5 + torch.rand(()))).clamp(0, 1), index % 10


def batches_of_run(
    dataset: Images, batch: int, num_workers: int
) -> tuple[Callable[[], Iterator[Any]], Callable[[], None]]:
    """Return a function that starts an epoch as a run of one rank and one virtual worker reads it, and one that ends its processes."""
    plan = Plan(PlanSpec(global_batch=batch, virtual_workers=1, last_step="drop"), len(dataset))
    items = Items(dataset)
    loader = Loader(num_workers)

    def epoch() -> Iterator[Any]:
        stream = ScriptReader(items, loader, plan, range(1), 0, "training")
        for _ in range(plan.total_steps):
            yield stream.take(0, batch).batch

    return epoch, loader.close


def rate_of(epoch: Callable[[], Iterator[Any]], batch: int) -> float:
    """Return the samples per second of an epoch, from its first batch to its last."""
    batches = epoch()
    next(batches)
    began = time.perf_counter()
    count = sum(1 for _ in batches)
    return count * batch / (time.perf_counter() - began)


def item_ms(dataset: Images) -> float:
    """Return the time for one sample in milliseconds, on one thread of this process."""
    torch.set_num_threads(1)
    for index in range(50):
        dataset[index]
    began = time.perf_counter()
    for index in range(300):
        dataset[index]
    return (time.perf_counter() - began) / 300 * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    parser.add_argument("--rows", type=int, default=6000, help="number of samples of an epoch (default: 6000)")
    parser.add_argument("--batch", type=int, default=32, help="number of samples of a batch (default: 32)")
    parser.add_argument("--processes", type=int, default=2, help="number of loader processes (default: 2)")
    options = parser.parse_args()
    dataset = Images(options.rows)
    per_item = item_ms(dataset)
    plain = DataLoader(
        dataset, options.batch, shuffle=True, num_workers=options.processes, drop_last=True, persistent_workers=True
    )
    epoch, close = batches_of_run(dataset, options.batch, options.processes)
    epochs: dict[str, Callable[[], Iterator[Any]]] = {"plain": lambda: iter(plain), "run": epoch}
    for each in epochs.values():
        rate_of(each, options.batch)  # starts the processes
    rounds = []
    for number in range(options.rounds):
        names = list(epochs) if number % 2 else list(epochs)[::-1]
        rates = {name: rate_of(epochs[name], options.batch) for name in names}
        figures = {f"{name}_samples_per_s": rates[name] for name in epochs}
        rounds.append({"item_ms": per_item, **figures, "ratio": rates["run"] / rates["plain"]})
    close()
    print_and_write("maps", rounds)


if __name__ == "__main__":
    main()
