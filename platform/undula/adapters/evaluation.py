"""Evaluation on several ranks in the order of the dataset, so that what is computed from it does not depend on the world size."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from undula.data.script.dataset import IndexedDataset
from undula.data.script.items import Collate, Items, Request
from undula.data.script.loader_processes import Loader
from undula.plan.keys import key64, subkeys
from undula.train.randomness import seed_validation
from undula.train.run import Run


def kept_loader(run: Run, name: str, num_workers: int) -> Loader:
    """Return the loader of the evaluation dataset with a name, whose processes are there for the next evaluation and the next group."""
    return run.keep(f"evaluation loader {name}", lambda: Loader(num_workers), Loader.close)


class RankBatches:
    """Batches of a dataset in its order, of which each rank evaluates its share: in round r, the k-th of W ranks has batch r * W + k.

    A rank for which the last round has no batch evaluates the last one again, and what it contributes is dropped.

    Args:
        run: The run.
        dataset: Dataset with a length.
        collate_fn: Function that makes a batch of a list of samples.
        batch_size: Number of samples in a batch.
        loader: Loader of the batches. Its processes keep the dataset, so it is for this dataset only.
    """

    def __init__(self, run: Run, dataset: IndexedDataset, collate_fn: Collate, batch_size: int, loader: Loader):
        self.dataset = dataset
        self.batch_size = batch_size
        self._run = run
        self._collate = collate_fn
        self._loader = loader
        self._sizes: list[int] = []
        """Number of samples of each rank in the current round; 0 for a rank without a batch."""
        self._round = 0

    def __len__(self) -> int:
        """Return the number of rounds."""
        return -(-self._num_batches // self._run.world_size)

    @property
    def _num_batches(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Yield a batch of this rank in each round. All ranks iterate together."""
        rank, size = self._run.rank, self._run.world_size
        rounds = [range(number * size, (number + 1) * size) for number in range(len(self))]
        self._round = 0
        try:
            requests = (self._request(self._batch_of(numbers[rank])) for numbers in rounds)
            self._loader.begin(Items(self.dataset, self._collate), requests)
            for numbers in rounds:
                self._run.alive()
                _, batch = self._loader.next()
                self._sizes = [self._size(number) for number in numbers]
                seed_validation(self._run.plan.spec.seed, 0, 0, self._batch_of(numbers[rank]))
                yield batch
                self._round += 1
        finally:
            self._sizes = []
            # What is computed next, such as bootstrapped metrics, is the same on all ranks and at any world size.
            self._seed_alike(self._num_batches)
            self._loader.free()

    def gathered(self, value: Any) -> list[tuple[Any, int]]:
        """Return a value of each rank that has a batch in this round, in the order of the dataset, with the size of the batch.

        All ranks call this. Tensors are in host memory.
        """
        parts = self._run.gather(value)
        self._seed_alike(self._round)
        return [(part, size) for part, size in zip(parts, self._sizes, strict=True) if size]

    def _seed_alike(self, number: int) -> None:
        """Seed the random numbers equally on all ranks, which have drawn those of their own batches."""
        seed_validation(self._run.plan.spec.seed, 0, 1, number)

    def _batch_of(self, number: int) -> int:
        """Return the number of the batch that a rank evaluates, which is another one's in a round without a batch for it."""
        return min(number, self._num_batches - 1)

    def _size(self, number: int) -> int:
        return max(min(self.batch_size, len(self.dataset) - number * self.batch_size), 0)

    def _request(self, batch: int) -> Request:
        seed, start = self._run.plan.spec.seed, batch * self.batch_size
        ids = np.arange(start, start + self._size(batch), dtype=np.int64)
        keys = subkeys(key64("evaluation sample", seed), ids)
        return Request(ids, keys, int(subkeys(key64("evaluation collate", seed), batch)))
